// SPDX-License-Identifier: Apache-2.0
// Detects failures, explains them to the peers, and closes the group.
#include <algorithm>
#include <cmath>

#include "custom_ops/comm/clock.h"
#include "custom_ops/comm/process_group.h"
#include "custom_ops/common/message.h"
#include "tensorflow/core/platform/logging.h"

namespace tfdist {

namespace {

// How long peers may take to answer a goodbye.
constexpr std::chrono::milliseconds kAnswerTime{2000};
// How long to wait until the transport's thread has read the end of a
// connection.
constexpr std::chrono::milliseconds kNoticeTime{1500};
// Multiple of the timeout that a live rank may spend outside of all collectives
// while peers wait for it. Reading, saving and tracing may take long.
constexpr int kMostTimeoutsOutside = 5;
// Multiple of the timeout that an operation waits for a rank that sends it
// nothing, while bytes of other operations move.
constexpr int kMostMoving = 20;
// After a network interruption, the system may take this long to retransmit.
constexpr int64_t kRetransmission = 2'000'000'000;
// How long a peer that has said goodbye may be silent but still connected.
constexpr int64_t kGoodbyeTime = 3'000'000'000;
// Limit of the time that counts between two ticks; see CountTime.
constexpr int64_t kLongestTick = 500'000'000;

// How long an operation continues after TensorFlow has cancelled it. Usually
// all ranks see the same error in the same step. They remain in step if each
// completes the operations that it has begun.
constexpr int64_t kMaxTimeCancelled = 1'000'000'000;

// Codes of a pong.
constexpr int32_t kInside = 0;
constexpr int32_t kOutside = 1;  // in no collective
constexpr int32_t kMoving = 2;   // in a collective whose bytes move

}  // namespace

void ProcessGroup::SendControl(int peer, const ControlFrame& frame) {
  try {
    transport_.SendControl(peer, frame);
  } catch (const ProtocolError& error) {
    Fail(peer, absl::StatusCode::kInternal,
         InvalidDataReason(peer, error.what()));
  } catch (const std::exception&) {
    // The connection is lost. The transport's thread detects this itself.
  }
}

void ProcessGroup::SendControlToAll(const ControlFrame& frame) {
  for (int step = 1; step < world_size(); ++step) {
    SendControl(PeerAfter(step), frame);
  }
}

void ProcessGroup::SendGoodbye(const std::string& error) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!started_) return;
  const bool in_use =
      std::any_of(running_.begin(), running_.end(),
                  [](const auto& each) { return !each->background; });
  lock.unlock();
  if (in_use) {
    Fail(rank(), absl::StatusCode::kUnavailable,
         Message(RankName(rank()), error.empty() ? " closed its process group"
                                                 : " failed: " + error));
  }
  ControlFrame goodbye;
  goodbye.type = Control::kGoodbye;
  goodbye.rank = rank();
  SetText(goodbye.text, error.c_str());
  SendControlToAll(goodbye);
  lock.lock();
  changed_.wait_for(lock, kAnswerTime, [&] {
    for (int peer = 0; peer < world_size(); ++peer) {
      const Peer& state = peers_[peer];
      if (peer != rank() && !state.said_goodbye && !state.lost) return failed();
    }
    return true;
  });
}

void ProcessGroup::OnControl(int peer, ControlFrame& frame) {
  switch (frame.type) {
    case Control::kPing:
      return OnPing(peer, frame);
    case Control::kPong: {
      std::lock_guard<std::mutex> lock(mutex_);
      peers_[peer].pong = frame.nonce;
      peers_[peer].pong_text = GetText(frame.text);
      peers_[peer].pong_code = frame.code;
      return;
    }
    case Control::kAbort: {
      const bool is_rank = frame.rank >= 0 && frame.rank < world_size();
      const auto code = static_cast<absl::StatusCode>(frame.code);
      return Fail(
          is_rank ? frame.rank : peer,
          code == absl::StatusCode::kOk ? absl::StatusCode::kUnknown : code,
          GetText(frame.text));
    }
    case Control::kLeave:
      return OnLeave(peer, frame);
    case Control::kInsert:
    case Control::kInserted:
    case Control::kValue:
      return OnKey(peer, frame);
    case Control::kGoodbye: {
      std::lock_guard<std::mutex> lock(mutex_);
      peers_[peer].said_goodbye = true;
      peers_[peer].error = GetText(frame.text);
      changed_.notify_all();
      return;
    }
  }
  throw ProtocolError(
      "it sent an unknown control message. Use the same version of tfdist_ext "
      "on all ranks");
}

void ProcessGroup::OnPing(int peer, ControlFrame& frame) {
  const std::string asked = GetText(frame.text);
  const std::string running = DescribeRunning();
  int64_t moved = 0;
  for (int other = 0; other < world_size(); ++other) {
    if (other != rank()) moved = std::max(moved, transport_.last_moved(other));
  }
  ControlFrame pong;
  pong.type = Control::kPong;
  pong.rank = rank();
  pong.nonce = frame.nonce;
  if (running.empty()) {
    pong.code = kOutside;
  } else {
    const int64_t recently = Now() - Nanoseconds(options_.timeout / 2);
    const bool moves = moved > recently || transport_.InFlight();
    pong.code = moves ? kMoving : kInside;
  }
  const bool reached = running.find(asked) != std::string::npos;
  SetText(pong.text,
          Message(reached ? "" : "has not started it; it ",
                  running.empty() ? "runs no collective" : "runs ", running)
              .c_str());
  SendControl(peer, pong);
}

std::string ProcessGroup::LossReason(int peer) const {
  const Peer& state = peers_[peer];
  if (!state.said_goodbye) {
    return RankName(peer) + " is gone: its process died or was killed";
  }
  if (!state.error.empty()) return RankName(peer) + " failed: " + state.error;
  return RankName(peer) +
         " has closed its process group and left (its script ended before this"
         " one's)";
}

std::string ProcessGroup::InvalidDataReason(int peer,
                                            const std::string& why) const {
  return Message(RankName(peer), " sent invalid data: ", why);
}

void ProcessGroup::OnLost(int peer, const std::string& error) {
  std::unique_lock<std::mutex> lock(mutex_);
  peers_[peer].lost = true;
  changed_.notify_all();
  // After a goodbye, only operations that still need the peer fail; see OnTick.
  if (closed_ || (peers_[peer].said_goodbye && error.empty())) return;
  const std::string reason =
      error.empty() ? LossReason(peer) : InvalidDataReason(peer, error);
  lock.unlock();
  Fail(peer,
       error.empty() ? absl::StatusCode::kUnavailable
                     : absl::StatusCode::kInternal,
       reason);
}

void ProcessGroup::OnConnectionError(int peer) {
  std::unique_lock<std::mutex> lock(mutex_);
  // Before the peer left, it may have sent the reason, such as the death of
  // another rank.
  changed_.wait_for(lock, kNoticeTime,
                    [&] { return failed() || peers_[peer].lost; });
  if (failed()) return;
  const std::string reason = LossReason(peer);
  lock.unlock();
  Fail(peer, absl::StatusCode::kUnavailable, reason);
}

void ProcessGroup::OnDeviceError(const std::string& reason) {
  {
    // If a peer has died, its connections report this too, and name the peer.
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, kNoticeTime, [&] { return failed(); });
  }
  Fail(rank(), absl::StatusCode::kUnavailable,
       Message(RankName(rank()), ": ", reason));
}

void ProcessGroup::Fail(int culprit, absl::StatusCode code,
                        const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed()) return;
    failure_code_ = code;
    failure_ = reason;
    failed_.store(true, std::memory_order_release);
  }
  ControlFrame abort;
  abort.type = Control::kAbort;
  abort.rank = culprit;
  abort.code = static_cast<int32_t>(code);
  SetText(abort.text, reason.c_str());
  SendControlToAll(abort);
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& operation : running_) operation->Abort();
  changed_.notify_all();
}

absl::Status ProcessGroup::FailureOf(const Operation& operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string what =
      Message("rank ", rank(), ": ", operation.Describe(), " failed: ");
  if (failed()) return absl::Status(failure_code_, what + failure_);
  const auto cause = causes_.find(operation.generation);
  if (cause == causes_.end() && operation.given_up()) {
    return absl::CancelledError(what + "another op of the same step failed");
  }
  if (cause == causes_.end()) {
    return absl::UnavailableError(what + "its connection broke");
  }
  if (!operation.background && operation.generation == generation_) {
    cause_reported_ = true;
  }
  return absl::AbortedError(what + cause->second);
}

void ProcessGroup::AbortStaleOperations() {
  for (const auto& operation : running_) {
    const int peer = operation->waiting_for();
    const auto left = [&](const Peer& each) {
      return each.generation > operation->generation;
    };
    const bool peer_left = operation->on_device_since() > 0
                               ? std::any_of(peers_.begin(), peers_.end(), left)
                               : peer >= 0 && left(peers_[peer]);
    if (peer_left || operation->generation < generation_) operation->Abort();
  }
}

int ProcessGroup::FindLostPeerInUse() const {
  for (const auto& operation : running_) {
    if (operation->background) continue;
    for (int peer = 0; peer < world_size(); ++peer) {
      const Peer& state = peers_[peer];
      const bool gone = state.lost || (state.said_goodbye &&
                                       state.heard.lasted > kGoodbyeTime);
      if (gone && operation->WaitsFor(peer)) return peer;
    }
  }
  return -1;
}

std::shared_ptr<Operation> ProcessGroup::FindOverdueCancelled() const {
  for (const auto& operation : running_) {
    const bool over = operation->cancelled_for > kMaxTimeCancelled;
    if (over && !operation->given_up()) return operation;
  }
  return nullptr;
}

// Counts time only while this process runs. If this process was stopped, the
// peers may have been stopped too, or their messages may be unread. The time
// between two such ticks says nothing about the peers.
void ProcessGroup::CountTime() {
  const int64_t now = Now();
  const int64_t passed = std::min(now - last_tick_, kLongestTick);
  last_tick_ = now;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    peers_[peer].heard.Count(transport_.last_heard(peer), passed);
  }
  for (const auto& operation : running_) {
    if (operation->background) continue;
    operation->moved.Count(LastMoved(*operation), passed);
    operation->waited += passed;
    if (operation->cancelled()) operation->cancelled_for += passed;
  }
}

// Requested by every operation that begins.
bool ProcessGroup::OnTick() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_ || failed() || running_.empty()) return false;
  CountTime();
  AbortStaleOperations();
  if (const int gone = FindLostPeerInUse(); gone >= 0) {
    const std::string reason = LossReason(gone);
    lock.unlock();
    Fail(gone, absl::StatusCode::kUnavailable, reason);
    return false;
  }
  if (const auto cancelled_for = FindOverdueCancelled();
      cancelled_for != nullptr) {
    if (leaves_) {
      cancelled_for->GiveUp();
      return true;
    }
    lock.unlock();
    Fail(rank(), absl::StatusCode::kUnavailable,
         Message(RankName(rank()),
                 " failed: another op of the same step failed (see the output "
                 "of this rank), while ",
                 cancelled_for->Name(), " waited"));
    return false;
  }
  const int64_t now = Now();
  int64_t longest = 0;
  for (const auto& operation : running_) {
    longest = std::max(longest, operation->moved.lasted);
  }
  const std::shared_ptr<Operation> late = Late(Nanoseconds(options_.timeout));
  const bool asks = longest > Nanoseconds(options_.timeout / 2) &&
                    now - last_ping_ > Nanoseconds(options_.timeout / 4);
  ControlFrame ping;
  if (asks) {
    last_ping_ = now;
    ping.type = Control::kPing;
    ping.rank = rank();
    ping.nonce = ++pings_;
    SetText(ping.text, Late(0)->Name().c_str());
  }
  lock.unlock();
  if (asks) SendControlToAll(ping);
  if (late != nullptr) OnDeadline(late);
  return true;
}

// Returns when the operation began, or when the rank that it waits for last
// sent or received bytes.
int64_t ProcessGroup::LastMoved(const Operation& operation) const {
  const int peer = operation.waiting_for();
  const bool known = peer >= 0 && peer != rank();
  return std::max({operation.start, operation.on_device_since(),
                   known ? transport_.last_moved(peer) : 0});
}

std::shared_ptr<Operation> ProcessGroup::Late(int64_t than) const {
  std::shared_ptr<Operation> late;
  for (const auto& operation : running_) {
    if (operation->moved.lasted > than &&
        (late == nullptr || operation->start < late->start)) {
      late = operation;
    }
  }
  return late;
}

std::vector<int> ProcessGroup::SilentPeers() const {
  std::vector<int> ranks;
  const int64_t limit = Nanoseconds(options_.timeout) + kRetransmission;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank() && !peers_[peer].said_goodbye &&
        peers_[peer].heard.lasted > limit) {
      ranks.push_back(peer);
    }
  }
  return ranks;
}

// Names a silent peer first, because the peer that `operation` waits for may
// itself wait for the silent one. For the same reason, a peer outside of all
// collectives gets more time, and all peers get more while bytes move or are in
// flight.
void ProcessGroup::OnDeadline(const std::shared_ptr<Operation>& operation) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (failed() || running_.count(operation) == 0) return;
  const std::vector<int> silent = SilentPeers();
  const double waited = static_cast<double>(operation->waited) / 1e9;
  const bool may_move =
      operation->moved.lasted < Nanoseconds(kMostMoving * options_.timeout);
  const double limit = kMostTimeoutsOutside * options_.timeout;
  const std::string after =
      Message(" within ", std::round(waited * 10) / 10,
              " s (timeout: ", options_.timeout, " s) of ", operation->Name());
  int culprit = operation->waiting_for();
  std::string reason;
  if (!silent.empty()) {
    culprit = silent[0];
    for (int peer : silent) {
      reason += (reason.empty() ? "" : " and ") + RankName(peer);
    }
    reason +=
        Message(" sent nothing", after,
                ", not even a reply to a ping (stopped, hung or unreachable)");
  } else if (may_move && (!AllHaveAnswered() || FindPeerInState(kMoving) >= 0 ||
                          transport_.InFlight())) {
    return;
  } else if (const int slow = FindPeerInState(kOutside);
             slow >= 0 && waited < limit) {
    if (Now() - last_warning_ < Nanoseconds(options_.timeout)) return;
    last_warning_ = Now();
    LOG(WARNING) << "tfdist_ext: rank " << rank() << " has waited "
                 << std::round(waited) << " s in " << operation->Name() << ". "
                 << RankName(slow) << " is alive and runs no collective: it "
                 << "reads data, traces, saves or hangs. The wait ends after "
                 << limit << " s.";
    return;
  } else if (culprit >= 0 && peers_[culprit].said_goodbye) {
    reason = LossReason(culprit);
  } else if (culprit >= 0 && culprit != rank()) {
    reason = Message(RankName(culprit), " did not take part", after,
                     "; it is alive and ", peers_[culprit].pong_text);
  } else {
    culprit = rank();
    reason = Message(RankName(culprit), " did not finish", after);
    if (operation->on_device_since() > 0) {
      reason +=
          ", which has started on the GPUs of all ranks. Set NCCL_DEBUG=INFO "
          "to "
          "see where NCCL waits, or TFDIST_NCCL=0 to exchange through host "
          "memory";
    }
  }
  lock.unlock();
  Fail(culprit, absl::StatusCode::kUnavailable, reason);
}

bool ProcessGroup::AllHaveAnswered() const {
  for (int peer = 0; peer < world_size(); ++peer) {
    const Peer& state = peers_[peer];
    const bool answered = pings_ > 0 && state.pong == pings_;
    if (peer != rank() && !answered && !state.said_goodbye) return false;
  }
  return true;
}

int ProcessGroup::FindPeerInState(int32_t code) const {
  for (int peer = 0; peer < world_size(); ++peer) {
    const Peer& state = peers_[peer];
    if (pings_ > 0 && state.pong == pings_ && state.pong_code == code) {
      return peer;
    }
  }
  return -1;
}

std::string ProcessGroup::DescribeRunning() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const auto& operation : running_) {
    if (operation->background) continue;
    if (text.size() > 600) return text + ", ...";
    text += (text.empty() ? "" : ", ") + operation->Describe();
  }
  return text;
}

}  // namespace tfdist
