// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_REQUEST_STATE_H_
#define TFDIST_CUSTOM_OPS_COMM_REQUEST_STATE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "custom_ops/comm/operation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfdist {

// Parts of a request's call.
constexpr uint32_t kMessagePart = 0;
constexpr uint32_t kReplyPart = 1;

// Every rank sends its requests with a tag of its own: the ranks run different
// numbers of requests. `rank` world_size is the tag by which a rank serves
// itself.
inline int64_t QueueOf(int64_t tag, int rank) {
  const uint64_t mixed =
      (static_cast<uint64_t>(tag) ^
       (0x9E3779B97F4A7C15u * (static_cast<uint64_t>(rank) + 1))) *
      0xBF58476D1CE4E5B9u;
  return static_cast<int64_t>(mixed >> 2);
}

// A message of this rank to itself, and its reply.
struct OwnMessage {
  uint32_t generation = 0;
  tensorflow::Tensor payload;
  int64_t step = 0;
  std::shared_ptr<Operation> request;
  std::mutex mutex;  // guards the members below
  bool replied = false;
  tensorflow::Tensor reply;
  std::string error;

  bool HasReply();
  void SetReply(const tensorflow::Tensor& values, const std::string& text);
};

// A message that a Serve op has returned, and that waits for its reply.
struct Served {
  std::shared_ptr<Operation> operation;
  std::mutex mutex;  // guards the members below
  bool replied = false;
  tensorflow::Tensor reply;
  std::string error;
  std::function<void()> sent;

  bool HasReply();
};

// A Serve op that waits for a message.
struct Server {
  tensorflow::OpKernelContext* ctx = nullptr;  // valid until `done` is called
  std::function<void()> done;
  int64_t handler = 0;
};

// What the operations of a group have in common that request and serve.
//
// A *queue* is the sequence of requests of one rank with one tag; see QueueOf.
// An operation receives the next message of a queue. It does not end while
// nobody serves the queue, because the ranks count the operations of a queue.
class RequestState {
 public:
  explicit RequestState(int world_size) : clocks_(world_size) {}

  // Messages of this rank to itself. Await names the operation that waits for
  // them. Pop returns null if there is no message of `generation`.
  void Push(int64_t queue, std::shared_ptr<OwnMessage> message);
  void Await(int64_t queue, std::shared_ptr<Operation> operation);
  std::shared_ptr<OwnMessage> Pop(int64_t queue, uint32_t generation);

  // The message of a queue that waits for its reply. Take returns null if there
  // is none.
  void SetServed(int64_t queue, std::shared_ptr<Served> served);
  std::shared_ptr<Served> TakeServed(int64_t queue);

  // Sets the handler that answers messages with `tag`. Servers for earlier
  // handlers stop waiting. Returns these servers.
  std::vector<Server> SetHandler(int64_t tag, int64_t handler);
  // Lets a server wait for the next message of a queue. If no operation
  // receives the message, `operation` does.
  enum class Attached { kStopped, kWaits, kNew };
  Attached Attach(int64_t queue, int64_t tag, const Server& server,
                  const std::shared_ptr<Operation>& operation);
  // Moves the server of a queue to `server`. Returns whether there is one.
  bool TakeServer(int64_t queue, std::optional<Server>* server);
  // Ends what an operation does for a queue. Returns its server, if it has one.
  std::optional<Server> Detach(int64_t queue,
                               const std::shared_ptr<Operation>& operation);

  // The clock of a rank is the number of steps that it has completed. A clock
  // never goes back.
  void SetClock(int rank, int64_t step);
  bool AllReached(int64_t step);

  // A lock of the rows and variables of this rank. The queue whose message is
  // being answered holds it. TryLock also returns true if `queue` holds it.
  bool TryLock(int64_t queue);
  void Unlock(int64_t queue);

  // Wakes `operation` when a clock or the lock changes, until Ignore.
  void Notify(std::shared_ptr<Operation> operation);
  void Ignore(const std::shared_ptr<Operation>& operation);

 private:
  struct OwnQueue {
    std::deque<std::shared_ptr<OwnMessage>> messages;
    std::shared_ptr<Operation> operation;  // waits for the next message
  };
  struct Waiting {
    int64_t tag = 0;
    std::shared_ptr<Operation> operation;
    std::optional<Server> server;
  };

  void AdvanceNotified();

  std::mutex mutex_;  // guards all members
  std::map<int64_t, OwnQueue> own_;
  std::map<int64_t, std::shared_ptr<Served>> served_;
  std::map<int64_t, Waiting> waiting_;
  std::map<int64_t, int64_t> handlers_;
  std::vector<int64_t> clocks_;
  std::optional<int64_t> locked_;
  std::vector<std::shared_ptr<Operation>> notified_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_REQUEST_STATE_H_
