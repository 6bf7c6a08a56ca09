// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_PROCESS_GROUP_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_PROCESS_GROUP_H_

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/collective/all_reduce_form.h"
#include "custom_ops/collective/channel.h"
#include "custom_ops/collective/operation.h"
#include "custom_ops/collective/scratch.h"
#include "custom_ops/collective/transport.h"
#include "custom_ops/collective/wire.h"
#include "custom_ops/common/waiter_threads.h"

namespace tfdist {

class GpuLinks;

struct GroupOptions {
  int rank = 0;
  int world_size = 1;
  double timeout = 60;  // seconds, of every wait (see OnDeadline)
  std::vector<std::string> addresses;  // "host:port" of each rank, for errors
  std::optional<AllReduceForm> all_reduce;  // always, in place of a choice
  uint64_t most_early = 0;  // bytes that a peer may send ahead; see Inbox
};

// What a group has done so far. Bytes are headers and payloads.
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
  int64_t writes = 0;  // calls of the system that messages left by
  int64_t calls = 0;
  std::map<std::string, PerLabel> labels;
  // Seconds that operations waited for ranks to come, by the rank that came
  // last. Those that wait at once wait once.
  std::vector<double> waited;
};

// An operation that has ended, while a group traced.
struct TracedOperation {
  std::string label;
  Kind kind;
  int64_t tag;  // with `call` the same on all ranks
  int64_t call;
  int64_t start;  // of the clock of Now()
  int64_t end;
  std::vector<int64_t> sent_to;  // bytes, by peer
  std::vector<int64_t> received_from;
};

// The ranks of one job, connected pairwise over TCP, as seen by one of them.
//
// Nothing here is global to the process: several groups, of different ranks
// even, may live in one process. Life: constructor, Start, operations, Close.
// After a failure every operation ends with its reason.
//
// A rank that fails between operations (its file cannot be read, its program
// raises) leaves the *generation* instead: whoever waits for it there learns
// why, leaves as well, and all meet again in the next one. An operation needs a
// message from every rank, so it ends well on all ranks or on none: what a rank
// has sent before it left has come before the news that it left.
//
// Threads: the transport's moves the bytes, answers pings, sees peers die and
// turns an expired deadline into a reasoned failure; a waiter thread per
// running operation waits for its messages.
class ProcessGroup : public std::enable_shared_from_this<ProcessGroup>,
                     private TransportListener {
 public:
  // `sockets` are connected to each rank. Throws BadConnection and
  // std::system_error.
  ProcessGroup(GroupOptions options, std::vector<Transport::Pair> sockets);
  ~ProcessGroup();

  void Start();
  // In a forked process, which has no part in the group: closes its copies of
  // the connections.
  void CloseInChild() { transport_.CloseInChild(); }
  // Leaves in good order: peers are told, and awaited for a moment. `error` is
  // what the program has failed with, empty if it has not.
  void Close(const std::string& error = "");

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

  Transport& transport() { return transport_; }
  ScratchPool& scratch() { return scratch_; }
  const AllReduceChoice& all_reduce_choice() const {
    return all_reduce_choice_;
  }

  // Failure. The first reason counts; peers are told it and waits end.
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void Fail(int culprit, absl::StatusCode code, const std::string& reason);
  // A connection with `peer` broke: waits until the transport's thread has read
  // why, and fails the group.
  void OnBrokenPeer(int peer);
  // What moves data between GPUs has failed: waits until it is known whether a
  // peer has died, and fails the group.
  void OnBrokenDevice(const std::string& reason);
  // The group's failure, or why a rank left, told for one operation.
  absl::Status FailureOf(const Operation& operation);

  // Takes no further part in this generation and tells the peers why; `reason`
  // gives way to that of a peer that has left before. Operations that still run
  // end. Those that come after belong to the next generation.
  void Leave(const std::string& reason);
  // Whether Leave is called if what this rank does now fails.
  void SetLeaves(bool leaves) { leaves_ = leaves; }
  // Why a peer has left this generation, or nothing; and whether an operation
  // of this rank has ended with it.
  std::pair<std::string, bool> LeftBecause() const;

  // A store of keys, which rank 0 keeps: what is inserted first stays, and
  // comes to all ranks. AlreadyExists if the key has a value.
  absl::Status InsertKey(const std::string& key, const std::string& value);
  // Waits until some rank has inserted it; `seconds` of 0 is no limit.
  absl::StatusOr<std::string> AwaitKey(const std::string& key, double seconds);

  // What a CUDA build adds, if anything: all ranks have it or none.
  std::shared_ptr<GpuLinks> gpu_links() const;
  void SetGpuLinks(std::shared_ptr<GpuLinks> links);

  GroupStats Stats() const;
  // Notes every operation from now on, or no more; takes what was noted.
  std::vector<TracedOperation> Trace(bool on);
  bool traces() const { return traces_.load(std::memory_order_relaxed); }
  void CountSent(uint64_t bytes);
  void CountReceived(uint64_t bytes);
  // Around a wait for ranks to come; `peer` came last.
  void BeginWait();
  void EndWait(int peer);

 private:
  struct Peer {
    bool said_goodbye = false;
    std::string error;  // with which it said so
    bool lost = false;
    uint64_t pong = 0;  // the last ping that it has answered
    std::string pong_text;
    int32_t pong_code = 0;
    uint32_t generation = 0;  // the first that it has not left
    Unchanged heard;          // when anything came from it last
  };

  // process_group.cc
  std::shared_ptr<Channel> Acquire(const Operation& operation);
  void Begin(std::shared_ptr<Operation> operation, bool post_inline,
             std::function<void()> post, std::function<void()> body,
             std::function<void(absl::Status)> done);
  void Finish(const std::shared_ptr<Operation>& operation,
              const absl::Status& status,
              const std::function<void(absl::Status)>& done);
  void Debug(const Operation& operation, const std::string& text) const;

  // control.cc
  void OnControl(int peer, ControlFrame& frame) override;
  void OnLost(int peer, const std::string& error) override;
  bool OnTick() override;
  void SendControl(int peer, const ControlFrame& frame);
  void SendControlToAll(const ControlFrame& frame);
  void SayGoodbye(const std::string& error);
  void OnPing(int peer, ControlFrame& frame);
  std::string NotUnderstood(int peer, const std::string& why) const;
  // With mutex_ held.
  void CountTime();
  void AbortWhatNobodyAnswers();
  int64_t LastMoved(const Operation& operation) const;
  std::shared_ptr<Operation> Late(int64_t than) const;  // nanoseconds
  std::vector<int> SilentPeers() const;
  bool AllHaveAnswered() const;
  int PeerThatSays(int32_t code) const;  // in the last pong, or -1
  void OnDeadline(const std::shared_ptr<Operation>& operation);
  std::string DescribeRunning() const;
  int PeerAwaitedInVain() const;
  std::shared_ptr<Operation> NotWantedAnyMore() const;
  std::string GoneReason(int peer) const;

  // generations.cc
  void OnLeave(int peer, ControlFrame& frame);
  bool Stale(const Operation& operation) const;
  void ForgetCauses();  // with mutex_ held

  // keys.cc
  absl::Status Insert(const std::string& key, const std::string& value);
  // Like `changed_.wait_for`, but in time that this process has run.
  void WaitFor(std::unique_lock<std::mutex>& lock, double seconds,
               const std::function<bool()>& over);
  void OnKey(int peer, ControlFrame& frame);

  const GroupOptions options_;
  const bool debug_;
  const AllReduceChoice all_reduce_choice_;
  ScratchPool scratch_;
  WaiterThreads waiters_;

  std::atomic<bool> failed_{false};
  std::atomic<bool> leaves_{false};
  mutable std::mutex mutex_;  // guards all up to the next
  std::condition_variable changed_;
  bool started_ = false;
  bool closing_ = false;
  bool closed_ = false;
  absl::StatusCode failure_code_ = absl::StatusCode::kOk;
  std::string failure_;
  std::unordered_map<int64_t, std::shared_ptr<Channel>> channels_;
  std::set<std::shared_ptr<Operation>> running_;
  std::vector<Peer> peers_;
  uint32_t generation_ = 0;
  std::map<uint32_t, std::string> causes_;  // by generation that was left
  bool told_ = false;  // an operation of this generation has ended with its own
  uint64_t pings_ = 0;
  int64_t last_tick_ = 0;  // of the clock of Now()
  int64_t last_ping_ = 0;
  int64_t last_warning_ = 0;
  std::shared_ptr<GpuLinks> gpu_links_;
  std::map<std::string, std::string> keys_;
  uint64_t inserts_ = 0;  // requests to rank 0
  // Those that are not over: whether the key is new, once it has answered.
  std::map<uint64_t, std::optional<bool>> inserted_;

  std::atomic<bool> traces_{false};
  mutable std::mutex stats_mutex_;  // guards the next four
  GroupStats stats_;
  int waiting_ = 0;            // operations, for ranks to come
  int64_t waiting_since_ = 0;  // of the clock of Now(), not counted yet
  std::vector<TracedOperation> traced_;

  Transport transport_;  // last: its thread uses all others
};

// The groups of this process by handle; ops find theirs here. Never destroyed:
// its threads may run until the process ends.
int64_t RegisterGroup(std::shared_ptr<ProcessGroup> group);
std::shared_ptr<ProcessGroup> FindGroup(int64_t handle);
std::shared_ptr<ProcessGroup> RemoveGroup(int64_t handle);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_PROCESS_GROUP_H_
