// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_OPERATION_H_
#define TFDIST_CUSTOM_OPS_COMM_OPERATION_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/comm/clock.h"
#include "custom_ops/comm/data_link.h"
#include "custom_ops/comm/inbox.h"
#include "custom_ops/comm/wire.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfdist {

class ProcessGroup;
struct Channel;

// Ends an operation with a status. `group_lost` says whether the group fails
// too.
class OperationError : public std::exception {
 public:
  OperationError(absl::Status status, bool group_lost)
      : status(std::move(status)), group_lost(group_lost) {}
  const char* what() const noexcept override { return "OperationError"; }

  const absl::Status status;
  const bool group_lost;
};

// One call of a collective on this rank, from post to done. It owns its
// messages and a reference to every tensor that they point into.
class Operation : public Progress,
                  public std::enable_shared_from_this<Operation> {
 public:
  Operation(std::shared_ptr<ProcessGroup> group, Kind kind, int64_t tag,
            std::string label);

  // Sends a header, and a payload of `header.bytes` bytes. Send and Expect
  // throw OperationError when the group fails.
  void Send(int peer, const Header& header, const void* payload);
  // Returns the message `part` of this call from `peer`. It may have arrived
  // already.
  Incoming* Expect(int peer, uint32_t part);
  // Give sets the memory for the payload. TakeEarly leaves the payload in the
  // scratch memory into which it is received.
  void Give(int peer, Incoming* message, void* memory, uint64_t bytes);
  uint8_t* TakeEarly(int peer, Incoming* message);

  // The functions below block. They throw OperationError if the group fails or
  // a rank leaves first. `stage` must be a string literal.
  void AwaitHeader(int peer, Incoming* message, const char* stage);
  // Waits for the headers of all `messages`, given by peer, or until `ends`
  // returns true for one of them.
  void AwaitHeaders(const std::vector<std::pair<int, Incoming*>>& messages,
                    const std::function<bool(const Header&)>& ends,
                    const char* stage);
  bool HasHeader(int peer, const Incoming* message) const;
  // Returns whether the header arrives before `end`, in nanoseconds of Now().
  // Throws like AwaitHeader.
  bool AwaitHeaderUntil(int64_t end, int peer, Incoming* message);
  // Waits until `bytes` bytes of the payload have arrived.
  void AwaitBytes(int peer, Incoming* message, uint64_t bytes,
                  const char* stage);
  void AwaitSent(const char* stage);
  // Waits until `over` returns true. This process calls Advance when it may
  // have changed.
  void AwaitLocal(const std::function<bool()>& over, const char* stage);
  // Polls `over` until it returns true, because CUDA does not notify when a GPU
  // is ready. All ranks take part in the operation at this point. An aborted
  // operation may therefore still complete within a short time. If it does not,
  // the ranks are out of step and the group fails.
  void AwaitDevice(const std::function<bool()>& over, const char* stage);
  // When the wait for a GPU, and so for all ranks, began; see Now(). 0 if there
  // is no such wait.
  int64_t on_device_since() const { return on_device_since_; }
  // Waits end with `Stray` once any of these messages has a header. A rank that
  // runs the same operation as this rank sends none of them.
  struct Stray {};
  void ExpectNone(std::vector<std::pair<int, Incoming*>> strays) {
    strays_ = std::move(strays);
  }

  // Keeps a tensor alive for as long as the messages.
  void Keep(const tensorflow::Tensor& tensor) { tensors_.push_back(tensor); }
  void Keep(std::shared_ptr<uint8_t> scratch) {
    scratch_.push_back(std::move(scratch));
  }

  // Releases messages and tensors; no thread reads or writes them afterwards.
  // Waits for messages that are partly sent, unless the group has failed. If
  // the operation is given up, waits for all its messages, because peers that
  // do not know of it need them.
  void Release();

  // Wakes the wait of this operation: a message has arrived or is sent.
  void Advance() override;
  // Ends the current wait of this operation, or else its next one.
  void Abort();
  // Cancel records that this rank no longer needs the result; the peers do not
  // know of this. GiveUp ends the operation for that reason.
  void Cancel();
  void GiveUp();
  bool cancelled() const { return cancelled_; }
  bool given_up() const;

  // Returns, for example, "all_to_all 'layer emb/ids' (tag 2, stage receive
  // header, rank 1)".
  std::string Describe() const;
  std::string Name() const;

  const std::shared_ptr<ProcessGroup> group;
  const Kind kind;
  const int64_t tag;
  const std::string label;
  const int64_t start;      // nanoseconds; see Now()
  uint32_t generation = 0;  // of the group when the operation was started
  // The operation runs beside the program: it waits for requests, which may
  // never come, or belongs to a thread that saves. It has no deadline, peers
  // are not told that this rank runs it, and its waits and its failure do not
  // count as those of the program. To be set before it starts.
  bool background = false;
  // The only generation in which the operation may start, or -1. To be set
  // before it starts.
  int64_t only_generation = -1;
  std::shared_ptr<Channel> channel;
  // Times that count only while this process runs, guarded by the group's
  // mutex: since the awaited rank moved bytes, since the operation began, and
  // since it was cancelled.
  Unchanged moved;
  int64_t waited = 0;
  int64_t cancelled_for = 0;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  // Bytes by peer. To be called before Release.
  std::vector<int64_t> SentTo() const;
  std::vector<int64_t> ReceivedFrom() const;

  int waiting_for() const;
  // Whether the operation waits for something that `peer` has not sent.
  bool WaitsFor(int peer) const;

 private:
  struct Received {
    int peer;
    Incoming* message;
  };
  struct Sent {
    int peer;
    Outgoing message;
  };
  // Waits until `missing` returns -1. Otherwise `missing` returns the peer that
  // the operation waits for.
  void Wait(const char* stage, const std::function<int()>& missing);
  // Like Wait, but the group counts the time as a wait for peers.
  void WaitForRanks(const char* stage, const std::function<int()>& missing);
  // Requires the mutex. Whether the wait is over.
  bool Over();
  void CountHeader(const Incoming* message);
  bool HasStray() const;

  mutable std::mutex mutex_;  // guards the members up to missing_
  std::condition_variable changed_;
  bool aborted_ = false;
  bool given_up_ = false;
  int peer_ = -1;
  const char* stage_ = "start";
  // The condition of the current wait.
  const std::function<int()>* missing_ = nullptr;

  std::atomic<bool> cancelled_{false};
  std::atomic<int64_t> on_device_since_{0};
  std::deque<Sent> sent_;  // a deque, because messages must not move
  std::vector<Received> received_;
  std::vector<std::pair<int, Incoming*>> strays_;
  std::vector<tensorflow::Tensor> tensors_;
  std::vector<std::shared_ptr<uint8_t>> scratch_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_OPERATION_H_
