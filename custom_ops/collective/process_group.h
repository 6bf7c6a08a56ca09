// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_PROCESS_GROUP_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_PROCESS_GROUP_H_

#include <gloo/transport/context.h>
#include <gloo/transport/device.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/collective/channel.h"
#include "custom_ops/collective/operation.h"
#include "custom_ops/collective/scratch.h"
#include "custom_ops/collective/wire.h"
#include "custom_ops/common/waiter_threads.h"

namespace tfdist {

struct GroupOptions {
  int rank = 0;
  int world_size = 1;
  double timeout = 60;  // seconds, of every wait (see OnDeadline)
  std::vector<std::string> addresses;  // "host:port" of each rank, for errors
  std::string bind_address;            // numeric address of this rank's host
};

// What a group has done so far. Bytes are headers and payloads; Gloo adds 144
// bytes of its own per message.
struct GroupStats {
  struct PerLabel {
    int64_t calls = 0;
    int64_t bytes = 0;  // sent
    double seconds = 0;
  };
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  int64_t messages_sent = 0;
  int64_t messages_received = 0;
  int64_t calls = 0;
  std::map<std::string, PerLabel> labels;
};

// The ranks of one job, connected pairwise over TCP, as seen by one of them.
//
// Nothing here is global to the process: several groups, of different ranks
// even, may live in one process. Life: constructor (sockets listen), Connect,
// operations, Close. After a failure every operation ends with its reason.
//
// A rank that fails between operations (its file cannot be read, its program
// raises) leaves the *generation* instead: whoever waits for it there learns
// why, leaves as well, and all meet again in the next one. An operation needs a
// message from every rank, so it ends well on all ranks or on none: what a rank
// has sent before it left has come before the news that it left.
//
// Threads: Gloo's loop moves the bytes; a waiter thread per running operation
// waits for them; a control thread per peer sees it die, and answers pings; the
// watchdog turns an expired deadline into a reasoned failure.
class ProcessGroup : public std::enable_shared_from_this<ProcessGroup> {
 public:
  // Throws std::exception when the host's address cannot be bound.
  explicit ProcessGroup(GroupOptions options);
  ~ProcessGroup();

  // Where the peers find this rank; opaque bytes for Connect on the others.
  std::string AddressBlob() const;
  // Connects to all peers. `blobs[r]` is the blob of rank r.
  absl::Status Connect(const std::vector<std::string>& blobs);
  // Leaves in good order: peers are told, and awaited for a moment.
  void Close();

  int rank() const { return options_.rank; }
  int world_size() const { return options_.world_size; }
  const std::string& address(int rank) const {
    return options_.addresses[rank];
  }
  // Every rank sends to its successors in turn and hears its predecessors, so
  // that no rank is everyone's first. `step` runs from 1 to world_size - 1.
  int PeerAfter(int step) const { return (rank() + step) % world_size(); }
  int PeerBefore(int step) const {
    return (rank() - step + world_size()) % world_size();
  }
  // "rank 2 (10.0.0.3:2222)"
  std::string RankName(int rank) const;

  // Runs one operation. `post` and `body` may throw OperationError; `post`
  // must not wait. When `post_inline`, it runs on the caller's thread, which
  // saves a thread switch for small messages; `body` runs on a waiter thread.
  // `done` is called exactly once, with the operation's status.
  void Run(std::shared_ptr<Operation> operation, bool post_inline,
           std::function<void()> post, std::function<void()> body,
           std::function<void(absl::Status)> done);

  gloo::transport::Context& context() { return *context_; }
  ScratchPool& scratch() { return scratch_; }
  size_t MaximumFrame() const;
  // After a frame of a message of `bytes`: the capacity both ends use next.
  size_t NextCapacity(size_t capacity, uint64_t bytes) const;
  static constexpr size_t kInitialFrame = 4096;

  // Failure. The first reason counts; peers are told it and waits end.
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void Fail(int culprit, absl::StatusCode code, const std::string& reason);
  // Gloo refused or broke an operation with `peer`: waits until the peer's
  // control thread has said why, and fails the group.
  void OnBrokenPeer(int peer, const std::string& error);
  // The group's failure, or why a rank left, told for one operation.
  absl::Status FailureOf(const Operation& operation);

  // Takes no further part in this generation and tells the peers why; `reason`
  // gives way to that of a peer that has left before. Operations that still run
  // end. Those that come after belong to the next generation.
  void Leave(const std::string& reason);
  // Why a peer has left this generation, or nothing; and whether an operation
  // of this rank has ended with it.
  std::pair<std::string, bool> LeftBecause() const;

  // A store of keys, which rank 0 keeps: what is inserted first stays, and
  // comes to all ranks. AlreadyExists if the key has a value.
  absl::Status InsertKey(const std::string& key, const std::string& value);
  // Waits until some rank has inserted it; `seconds` of 0 is no limit.
  absl::StatusOr<std::string> AwaitKey(const std::string& key, double seconds);

  GroupStats Stats() const;
  void CountSent(uint64_t bytes);
  void CountReceived(uint64_t bytes);

 private:
  struct ControlPeer {
    ControlFrame frame;
    std::unique_ptr<Buffer> buffer;
    std::thread thread;
    bool said_hello = false;
    bool said_goodbye = false;
    bool lost = false;
    uint64_t pong = 0;
    std::string pong_text;
    bool pong_outside = false;  // of all collectives
    uint64_t generation = 0;    // the first that it has not left
  };
  // Channels and operations of a generation that was left: Gloo may still hold
  // their buffers until all peers are past it.
  struct Retired {
    std::vector<std::unique_ptr<Channel>> channels;
    std::vector<std::shared_ptr<Operation>> operations;
  };

  // process_group.cc
  Channel* Acquire(Operation& operation);
  void Begin(std::shared_ptr<Operation> operation, bool post_inline,
             std::function<void()> post, std::function<void()> body,
             std::function<void(absl::Status)> done);
  void Finish(const std::shared_ptr<Operation>& operation,
              const absl::Status& status,
              const std::function<void(absl::Status)>& done);
  void Debug(const Operation& operation, const std::string& text) const;

  // control.cc
  void StartControl(uint64_t digest);
  void StopControl();
  absl::Status AwaitHellos();
  void Listen(int peer);
  bool OnControl(int peer, ControlFrame& frame);
  void OnLost(int peer, const std::string& error);
  void SendControl(int peer, ControlFrame frame);
  void OnLeave(int peer, ControlFrame& frame);
  bool Stale(const Operation& operation) const;
  // With mutex_ held.
  bool AbortWhatNobodyAnswers();  // whether there was any
  void FreeRetired();
  void Watch();
  void OnDeadline(const std::shared_ptr<Operation>& operation);
  // A peer that answered this ping and was in no collective then, or -1.
  int PeerOutside(uint64_t ping) const;
  std::string DescribeRunning() const;
  std::string GoneReason(int peer, const std::string& error) const;

  // keys.cc
  bool Insert(const std::string& key, const std::string& value);
  void OnKey(int peer, ControlFrame& frame);

  const GroupOptions options_;
  const bool debug_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  ScratchPool scratch_;
  WaiterThreads waiters_;

  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  bool connected_ = false;
  bool closing_ = false;
  bool closed_ = false;
  absl::StatusCode failure_code_ = absl::StatusCode::kOk;
  std::string failure_;
  std::unordered_map<int64_t, std::unique_ptr<Channel>> channels_;
  std::set<std::shared_ptr<Operation>> running_;
  // Failed operations: Gloo may still hold their buffers (see Operation).
  std::vector<std::shared_ptr<Operation>> graveyard_;
  std::vector<ControlPeer> peers_;
  // Control messages stay until the group ends: Gloo cannot tell without
  // waiting that one has left. They are few: hello, goodbye, pings, aborts.
  std::vector<std::unique_ptr<std::pair<ControlFrame, std::unique_ptr<Buffer>>>>
      control_sends_;
  std::thread watchdog_;
  Clock::time_point extended_;  // when a slow peer was last given time
  uint64_t generation_ = 0;
  std::map<uint64_t, std::string> causes_;  // by generation that was left
  bool told_ = false;  // an operation of this generation has ended with its own
  std::map<uint64_t, Retired> retired_;
  uint64_t digest_ = 0;
  uint64_t pings_ = 0;
  std::map<std::string, std::string> keys_;
  uint64_t inserts_ = 0;               // requests to rank 0
  std::map<uint64_t, bool> inserted_;  // its answers: whether it is new

  mutable std::mutex stats_mutex_;
  GroupStats stats_;
};

// The groups of this process by handle; ops find theirs here. Never destroyed:
// its threads may run until the process ends.
int RegisterGroup(std::shared_ptr<ProcessGroup> group);
std::shared_ptr<ProcessGroup> FindGroup(int handle);
std::shared_ptr<ProcessGroup> RemoveGroup(int handle);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_PROCESS_GROUP_H_
