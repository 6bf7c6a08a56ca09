// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_PROCESS_GROUP_H_
#define TFDIST_CUSTOM_OPS_COMM_PROCESS_GROUP_H_

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
#include "custom_ops/comm/all_reduce_form.h"
#include "custom_ops/comm/channel.h"
#include "custom_ops/comm/operation.h"
#include "custom_ops/comm/request_state.h"
#include "custom_ops/comm/scratch.h"
#include "custom_ops/comm/transport.h"
#include "custom_ops/comm/wire.h"
#include "custom_ops/common/waiter_threads.h"

namespace tfdist {

class GpuLinks;

struct GroupOptions {
  int rank = 0;
  int world_size = 1;
  double timeout = 60;  // seconds; the limit of every wait (see OnDeadline)
  // "host:port" of each rank, for error messages.
  std::vector<std::string> addresses;
  // If set, the form of every all_reduce.
  std::optional<AllReduceForm> all_reduce;
  // Limit of bytes that a peer sends before a receiver exists; see Inbox.
  uint64_t most_early = 0;
};

// What a group has done so far. Bytes include headers and payloads.
struct GroupStats {
  struct PerLabel {
    int64_t calls = 0;
    int64_t bytes = 0;  // bytes sent
    double seconds = 0;
  };
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  int64_t messages_sent = 0;
  int64_t messages_received = 0;
  int64_t writes = 0;  // system calls that sent messages
  int64_t calls = 0;
  std::map<std::string, PerLabel> labels;
  // Seconds that operations waited for peers, by the rank that arrived last.
  // Time during which several operations wait is counted once.
  std::vector<double> waited;
};

// A completed operation, recorded while tracing was on.
struct TracedOperation {
  std::string label;
  Kind kind;
  int64_t tag;  // the pair (tag, call) is the same on all ranks
  int64_t call;
  int64_t start;  // nanoseconds; see Now()
  int64_t end;
  std::vector<int64_t> sent_to;  // bytes, by peer
  std::vector<int64_t> received_from;
};

// The process group: all ranks of a job, connected pairwise over TCP, as seen
// by this rank.
//
// The class has no global state, so one process may contain several groups, and
// even several ranks. Order of use: constructor, Start, operations, Close.
// After a failure, every operation ends with the reason of that failure.
//
// A rank that fails between operations (a file cannot be read, its program
// raises an error) leaves the *generation* instead. Peers that wait for this
// rank in that generation receive the reason and leave too. All ranks then
// continue in the next generation. An operation needs a message from every
// rank. Messages that a rank sent before it left arrive before the news that it
// left. An operation therefore succeeds on all ranks or on none.
//
// Threads: the transport's thread moves bytes, answers pings, detects dead
// peers, and turns an expired timeout into a failure with a reason. Each
// running operation has a waiter thread that waits for its messages.
class ProcessGroup : public std::enable_shared_from_this<ProcessGroup>,
                     private TransportListener {
 public:
  // `sockets`: connected sockets, one pair per rank. Throws BadConnection and
  // std::system_error.
  ProcessGroup(GroupOptions options, std::vector<Transport::Pair> sockets);
  ~ProcessGroup();

  void Start();
  // Closes this process's copies of the connections. Call it in a forked
  // process, which is not a member of the group.
  void CloseInChild() { transport_.CloseInChild(); }
  // Leaves the group in good order: tells the peers and waits a short time for
  // them. `error` is the error that ended the program, empty if there is none.
  void Close(const std::string& error = "");

  int rank() const { return options_.rank; }
  int world_size() const { return options_.world_size; }
  const std::string& address(int rank) const {
    return options_.addresses[rank];
  }
  // Each rank sends to its successors in order and receives from its
  // predecessors, so that the ranks do not all send to the same rank first.
  // `step` is from 1 to world_size - 1.
  int PeerAfter(int step) const { return (rank() + step) % world_size(); }
  int PeerBefore(int step) const {
    return (rank() - step + world_size()) % world_size();
  }
  // Returns, for example, "rank 2 (10.0.0.3:2222)".
  std::string RankName(int rank) const;

  // Runs one operation. `post` and `body` may throw OperationError; `post` must
  // not wait. If `post_inline` is true, `post` runs on the caller's thread,
  // which saves a thread switch for small messages. `body` runs on a waiter
  // thread. `done` is called exactly once, with the status of the operation.
  void Run(std::shared_ptr<Operation> operation, bool post_inline,
           std::function<void()> post, std::function<void()> body,
           std::function<void(absl::Status)> done);

  Transport& transport() { return transport_; }
  ScratchPool& scratch() { return scratch_; }
  RequestState& requests() { return requests_; }
  const AllReduceChoice& all_reduce_choice() const {
    return all_reduce_choice_;
  }

  // Fails the group. Only the first reason counts. Peers are told the reason,
  // and all waits end.
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void Fail(int culprit, absl::StatusCode code, const std::string& reason);
  // Handles a broken connection to `peer`: waits until the transport's thread
  // has read the reason, and fails the group.
  void OnConnectionError(int peer);
  // Handles a failure of CUDA or NCCL: waits until it is known whether a peer
  // has died, and fails the group.
  void OnDeviceError(const std::string& reason);
  // Returns the failure of the group, or the reason why a rank left, worded for
  // `operation`.
  absl::Status FailureOf(const Operation& operation);

  // Leaves the current generation and tells the peers why. If a peer has left
  // before, its reason replaces `reason`. Running operations end. Later
  // operations belong to the next generation.
  void Leave(const std::string& reason);
  // Sets whether this rank calls Leave if its current work fails.
  void SetLeaves(bool leaves) { leaves_ = leaves; }
  // Returns the reason why a peer has left this generation, or "", and whether
  // an operation of this rank has ended with this reason.
  std::pair<std::string, bool> LeaveReason() const;
  uint32_t generation() const;

  // Inserts a value into the key-value store on rank 0. The first value of a
  // key is final and is sent to all ranks. Returns AlreadyExists if the key has
  // a value.
  absl::Status InsertKey(const std::string& key, const std::string& value);
  // Waits until a rank has inserted `key`. A limit of 0 `seconds` means no
  // limit.
  absl::StatusOr<std::string> AwaitKey(const std::string& key, double seconds);

  // The GPU connections of a CUDA build; null without. All ranks have them or
  // none has.
  std::shared_ptr<GpuLinks> gpu_links() const;
  void SetGpuLinks(std::shared_ptr<GpuLinks> links);

  GroupStats Stats() const;
  // Starts or stops recording operations. Returns, and clears, what was
  // recorded.
  std::vector<TracedOperation> Trace(bool on);
  bool traces() const { return traces_.load(std::memory_order_relaxed); }
  void CountSent(uint64_t bytes);
  void CountReceived(uint64_t bytes);
  // Called before and after a wait for peers; `peer` arrived last.
  void BeginWait();
  void EndWait(int peer);

 private:
  struct Peer {
    bool said_goodbye = false;
    std::string error;  // the error that the goodbye contained
    bool lost = false;
    uint64_t pong = 0;  // number of the last ping that the peer has answered
    std::string pong_text;
    int32_t pong_code = 0;
    uint32_t generation = 0;  // the first generation that the peer has not left
    Unchanged heard;          // last_heard of the connection
  };

  // Defined in process_group.cc.
  std::shared_ptr<Channel> Acquire(const Operation& operation);
  void Begin(std::shared_ptr<Operation> operation, bool post_inline,
             std::function<void()> post, std::function<void()> body,
             std::function<void(absl::Status)> done);
  void Finish(const std::shared_ptr<Operation>& operation,
              const absl::Status& status,
              const std::function<void(absl::Status)>& done);
  void Debug(const Operation& operation, const std::string& text) const;

  // Defined in control.cc.
  void OnControl(int peer, ControlFrame& frame) override;
  void OnLost(int peer, const std::string& error) override;
  bool OnTick() override;
  void SendControl(int peer, const ControlFrame& frame);
  void SendControlToAll(const ControlFrame& frame);
  void SendGoodbye(const std::string& error);
  void OnPing(int peer, ControlFrame& frame);
  std::string InvalidDataReason(int peer, const std::string& why) const;
  // The functions below require mutex_, except OnDeadline and DescribeRunning.
  void CountTime();
  void AbortStaleOperations();
  int64_t LastMoved(const Operation& operation) const;
  std::shared_ptr<Operation> Late(int64_t than) const;  // `than`: nanoseconds
  std::vector<int> SilentPeers() const;
  bool AllHaveAnswered() const;
  int FindPeerInState(int32_t code) const;  // in its last pong; -1 if none
  void OnDeadline(const std::shared_ptr<Operation>& operation);
  std::string DescribeRunning() const;
  int FindLostPeerInUse() const;
  std::shared_ptr<Operation> FindOverdueCancelled() const;
  std::string LossReason(int peer) const;

  // Defined in generations.cc.
  void OnLeave(int peer, ControlFrame& frame);
  bool Stale(const Operation& operation) const;
  void ForgetCauses();  // requires mutex_

  // Defined in keys.cc.
  absl::Status Insert(const std::string& key, const std::string& value);
  // Like `changed_.wait_for`, but `seconds` counts only time in which this
  // process has run.
  void WaitFor(std::unique_lock<std::mutex>& lock, double seconds,
               const std::function<bool()>& over);
  void OnKey(int peer, ControlFrame& frame);

  const GroupOptions options_;
  const bool debug_;
  const AllReduceChoice all_reduce_choice_;
  ScratchPool scratch_;
  RequestState requests_;
  WaiterThreads waiters_;

  std::atomic<bool> failed_{false};
  std::atomic<bool> leaves_{false};
  mutable std::mutex mutex_;  // guards the members up to stats_mutex_
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
  std::map<uint32_t, std::string> causes_;  // by the generation that was left
  // An operation has ended with the reason of this generation.
  bool cause_reported_ = false;
  uint64_t pings_ = 0;
  int64_t last_tick_ = 0;  // nanoseconds, see Now(); so are the next two
  int64_t last_ping_ = 0;
  int64_t last_warning_ = 0;
  std::shared_ptr<GpuLinks> gpu_links_;
  std::map<std::string, std::string> keys_;
  uint64_t inserts_ = 0;  // number of requests to rank 0
  // Pending requests, by number. Once rank 0 has answered, the value says
  // whether the key is new.
  std::map<uint64_t, std::optional<bool>> inserted_;

  std::atomic<bool> traces_{false};
  mutable std::mutex stats_mutex_;  // guards the members up to traced_
  GroupStats stats_;
  int waiting_ = 0;  // number of operations that wait for peers
  // Start of the wait that is not counted yet; see Now().
  int64_t waiting_since_ = 0;
  std::vector<TracedOperation> traced_;

  Transport transport_;  // last, because its thread uses all other members
};

// The groups of this process, by handle. Ops find their group here. The
// registry is never destroyed, because threads of groups may run until the
// process ends.
int64_t RegisterGroup(std::shared_ptr<ProcessGroup> group);
std::shared_ptr<ProcessGroup> FindGroup(int64_t handle);
std::shared_ptr<ProcessGroup> RemoveGroup(int64_t handle);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_PROCESS_GROUP_H_
