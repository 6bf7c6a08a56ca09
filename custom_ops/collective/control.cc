// SPDX-License-Identifier: Apache-2.0
// How a group notices, explains and spreads a failure, and how it ends.
#include <algorithm>
#include <cmath>
#include <utility>

#include "custom_ops/collective/process_group.h"
#include "custom_ops/common/message.h"
#include "tensorflow/core/platform/logging.h"

namespace tfdist {

namespace {

constexpr std::chrono::milliseconds kForever = std::chrono::hours(1000);
// How long a living peer may take to answer a ping or a goodbye.
constexpr std::chrono::milliseconds kAnswerTime{2000};
// Until a broken connection has been seen by the peer's control thread too.
constexpr std::chrono::milliseconds kNoticeTime{1000};
constexpr std::chrono::milliseconds kWatchPeriod{200};
// The same while something waits for a rank that has left.
constexpr std::chrono::milliseconds kLeavePeriod{20};
// Timeouts that a rank may spend outside of all collectives, alive, while
// others wait for it: reading, saving and tracing take what they take.
constexpr int kPatience = 5;

}  // namespace

void ProcessGroup::StartControl(uint64_t digest) {
  digest_ = digest;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    ControlPeer& state = peers_[peer];
    state.buffer =
        context_->createUnboundBuffer(&state.frame, sizeof(state.frame));
    state.thread = std::thread(&ProcessGroup::Listen, this, peer);
  }
  for (int peer = 0; peer < world_size(); ++peer) {
    ControlFrame hello;
    hello.type = Control::kHello;
    hello.rank = rank();
    hello.nonce = digest_;
    if (peer != rank()) SendControl(peer, hello);
  }
  watchdog_ = std::thread(&ProcessGroup::Watch, this);
}

absl::Status ProcessGroup::AwaitHellos() {
  std::unique_lock<std::mutex> lock(mutex_);
  auto silent = [&] {
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank() && !peers_[peer].said_hello) return peer;
    }
    return -1;
  };
  changed_.wait_for(lock, std::chrono::duration<double>(options_.timeout),
                    [&] { return failed() || silent() < 0; });
  if (failed()) {
    return absl::Status(
        failure_code_, Message("rank ", rank(), " cannot connect: ", failure_));
  }
  if (const int peer = silent(); peer >= 0) {
    return absl::UnavailableError(Message("rank ", rank(), ": ", RankName(peer),
                                          " is connected but says no hello"));
  }
  connected_ = true;
  return absl::OkStatus();
}

void ProcessGroup::StopControl() {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool in_use = !running_.empty();
  lock.unlock();
  if (in_use) {
    Fail(rank(), absl::StatusCode::kUnavailable,
         Message(RankName(rank()), " closed its process group"));
  }
  if (watchdog_.joinable()) {
    ControlFrame goodbye;
    goodbye.type = Control::kGoodbye;
    goodbye.rank = rank();
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank()) SendControl(peer, goodbye);
    }
  }
  lock.lock();
  changed_.wait_for(lock, kAnswerTime, [&] {
    return failed() ||
           std::all_of(peers_.begin(), peers_.end(), [](const auto& peer) {
             return !peer.thread.joinable() || peer.said_goodbye || peer.lost;
           });
  });
  closed_ = true;
  changed_.notify_all();
  for (ControlPeer& peer : peers_) {
    if (peer.buffer != nullptr) peer.buffer->abortWaitRecv();
  }
  lock.unlock();
  for (ControlPeer& peer : peers_) {
    if (peer.thread.joinable()) peer.thread.join();
  }
  if (watchdog_.joinable()) watchdog_.join();
}

void ProcessGroup::Listen(int peer) {
  ControlPeer& state = peers_[peer];
  try {
    state.buffer->recv(peer, kControlSlot);
    while (state.buffer->waitRecv(nullptr, kForever)) {
      ControlFrame frame = state.frame;
      state.buffer->recv(peer, kControlSlot);
      if (!OnControl(peer, frame)) return;
    }
  } catch (const std::exception& error) {
    OnLost(peer, error.what());
  }
}

bool ProcessGroup::OnControl(int peer, ControlFrame& frame) {
  if (frame.magic != kMagic) {
    Fail(peer, absl::StatusCode::kInternal,
         Message(RankName(peer), " sent a control message of another build"));
    return false;
  }
  switch (frame.type) {
    case Control::kHello: {
      if (frame.rank != peer || frame.nonce != digest_) {
        Fail(peer, absl::StatusCode::kInvalidArgument,
             Message(RankName(peer), " belongs to another process group (it ",
                     "says rank ", frame.rank, ")"));
        return false;
      }
      std::lock_guard<std::mutex> lock(mutex_);
      peers_[peer].said_hello = true;
      break;
    }
    case Control::kPing: {
      const std::string asked = GetText(frame.text);
      ControlFrame pong;
      pong.type = Control::kPong;
      pong.rank = rank();
      pong.nonce = frame.nonce;
      const std::string running = DescribeRunning();
      pong.code = running.empty() ? 1 : 0;
      const bool reached = running.find(asked) != std::string::npos;
      SetText(
          pong.text,
          Message(reached ? "" : "has not reached it, ",
                  running.empty() ? "is in no collective" : "is in ", running)
              .c_str());
      SendControl(peer, pong);
      return true;
    }
    case Control::kPong: {
      std::lock_guard<std::mutex> lock(mutex_);
      peers_[peer].pong = frame.nonce;
      peers_[peer].pong_text = GetText(frame.text);
      peers_[peer].pong_outside = frame.code == 1;
      break;
    }
    case Control::kAbort:
      Fail(frame.rank >= 0 && frame.rank < world_size() ? frame.rank : peer,
           static_cast<absl::StatusCode>(frame.code), GetText(frame.text));
      return true;
    case Control::kLeave:
      OnLeave(peer, frame);
      return true;
    case Control::kInsert:
    case Control::kInserted:
    case Control::kValue:
      OnKey(peer, frame);
      return true;
    case Control::kGoodbye: {
      std::lock_guard<std::mutex> lock(mutex_);
      peers_[peer].said_goodbye = true;
      break;
    }
  }
  changed_.notify_all();
  return true;
}

std::string ProcessGroup::GoneReason(int peer, const std::string& error) const {
  if (peers_[peer].said_goodbye) {
    return Message(RankName(peer),
                   " has closed its process group and left (its script ended",
                   " before this one's)");
  }
  return Message(RankName(peer), " is gone, its process died or was killed (",
                 error, ")");
}

void ProcessGroup::OnLost(int peer, const std::string& error) {
  std::unique_lock<std::mutex> lock(mutex_);
  peers_[peer].lost = true;
  changed_.notify_all();
  // After a goodbye only operations that still need the peer fail.
  if (closed_ || peers_[peer].said_goodbye) return;
  const std::string reason = GoneReason(peer, error);
  lock.unlock();
  Fail(peer, absl::StatusCode::kUnavailable, reason);
}

void ProcessGroup::OnBrokenPeer(int peer, const std::string& error) {
  std::unique_lock<std::mutex> lock(mutex_);
  // The control thread may know better: the peer may have told whose death
  // made it leave, just before it left.
  changed_.wait_for(lock, kNoticeTime,
                    [&] { return failed() || peers_[peer].lost; });
  if (failed()) return;
  const std::string reason = GoneReason(peer, error);
  lock.unlock();
  Fail(peer, absl::StatusCode::kUnavailable, reason);
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
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) SendControl(peer, abort);
  }
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
  if (cause == causes_.end()) {
    return absl::UnavailableError(what + "its connection broke");
  }
  told_ = told_ || operation.generation == generation_;
  return absl::AbortedError(what + cause->second);
}

void ProcessGroup::Leave(const std::string& reason) {
  ControlFrame leave;
  leave.type = Control::kLeave;
  leave.rank = rank();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed() || closing_ || !connected_) return;
    leave.nonce = generation_++;
    told_ = false;
    // The first cause is everybody's.
    const auto cause =
        causes_.emplace(leave.nonce, Message(RankName(rank()), ": ", reason));
    SetText(leave.text, cause.first->second.c_str());
    std::vector<std::unique_ptr<Channel>>& idle =
        retired_[leave.nonce].channels;
    for (auto& [tag, channel] : channels_) idle.push_back(std::move(channel));
    channels_.clear();
  }
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) SendControl(peer, leave);
  }
}

void ProcessGroup::OnLeave(int peer, ControlFrame& frame) {
  std::lock_guard<std::mutex> lock(mutex_);
  causes_.emplace(frame.nonce, GetText(frame.text));
  peers_[peer].generation = frame.nonce + 1;
  FreeRetired();
  changed_.notify_all();
}

std::pair<std::string, bool> ProcessGroup::LeftBecause() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto cause = causes_.find(generation_);
  if (failed() || cause == causes_.end()) return {"", false};
  return {cause->second, told_};
}

bool ProcessGroup::Stale(const Operation& operation) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return operation.generation != generation_;
}

bool ProcessGroup::AbortWhatNobodyAnswers() {
  bool any = false;
  for (const auto& operation : running_) {
    const int peer = operation->waiting_for();
    const bool peer_left =
        peer >= 0 && peers_[peer].generation > operation->generation;
    if (peer_left || operation->generation < generation_) {
      operation->Abort();
      any = true;
    }
  }
  return any;
}

void ProcessGroup::FreeRetired() {
  uint64_t oldest = generation_;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) oldest = std::min(oldest, peers_[peer].generation);
  }
  for (const auto& operation : running_) {
    oldest = std::min(oldest, operation->generation);
  }
  // One more is kept: a message may still be on its way out.
  while (!causes_.empty() && causes_.begin()->first + 1 < oldest) {
    retired_.erase(causes_.begin()->first);
    causes_.erase(causes_.begin());
  }
}

void ProcessGroup::SendControl(int peer, ControlFrame frame) {
  auto message =
      std::make_unique<std::pair<ControlFrame, std::unique_ptr<Buffer>>>();
  message->first = frame;
  message->second =
      context_->createUnboundBuffer(&message->first, sizeof(ControlFrame));
  try {
    message->second->send(peer, kControlSlot);
  } catch (const std::exception&) {
    // The peer is gone; its control thread deals with that.
  }
  std::lock_guard<std::mutex> lock(mutex_);
  control_sends_.push_back(std::move(message));
}

void ProcessGroup::Watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  const std::chrono::duration<double> timeout(options_.timeout);
  bool aborting = false;
  while (!closed_) {
    changed_.wait_for(lock, aborting ? kLeavePeriod : kWatchPeriod);
    if (closed_ || failed()) continue;
    aborting = AbortWhatNobodyAnswers();
    std::shared_ptr<Operation> late;
    const Clock::time_point now = Clock::now();
    if (now - extended_ <= timeout) continue;
    for (const auto& operation : running_) {
      if (now - operation->start > timeout &&
          (late == nullptr || operation->start < late->start)) {
        late = operation;
      }
    }
    if (late == nullptr) continue;
    lock.unlock();
    OnDeadline(late);
    lock.lock();
  }
}

// Asks every peer what it is doing. Who does not answer is the one to blame:
// the peer that `operation` waits for may itself wait for the silent one. For
// the same reason any peer outside of the collectives is given time.
void ProcessGroup::OnDeadline(const std::shared_ptr<Operation>& operation) {
  const uint64_t number = ++pings_;
  ControlFrame ping;
  ping.type = Control::kPing;
  ping.rank = rank();
  ping.nonce = number;
  SetText(ping.text, operation->Name().c_str());
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) SendControl(peer, ping);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  auto silent = [&] {
    std::vector<int> ranks;
    for (int peer = 0; peer < world_size(); ++peer) {
      const ControlPeer& state = peers_[peer];
      if (peer != rank() && state.pong != number && !state.said_goodbye) {
        ranks.push_back(peer);
      }
    }
    return ranks;
  };
  changed_.wait_for(lock, kAnswerTime,
                    [&] { return failed() || silent().empty(); });
  if (failed() || running_.count(operation) == 0) return;
  std::vector<int> ranks = silent();
  const double waited =
      std::chrono::duration<double>(Clock::now() - operation->start).count();
  const double limit = kPatience * options_.timeout;
  const int slow = ranks.empty() && waited < limit ? PeerOutside(number) : -1;
  if (slow >= 0) {
    extended_ = Clock::now();
    lock.unlock();
    LOG(WARNING) << "tfdist_ext: rank " << rank() << " has waited "
                 << std::round(waited) << " s in " << operation->Name() << ". "
                 << RankName(slow) << " is alive and in no collective: it "
                 << "reads, traces, saves or hangs. Waiting for " << limit
                 << " s in all.";
    return;
  }
  const std::string after =
      Message(" within ", std::round(waited * 10) / 10,
              " s (timeout: ", options_.timeout, " s) of ", operation->Name());
  int culprit = operation->waiting_for();
  std::string reason;
  if (!ranks.empty()) {
    culprit = ranks[0];
    for (int peer : ranks) {
      reason += (reason.empty() ? "" : " and ") + RankName(peer);
    }
    reason += Message(ranks.size() > 1 ? " are" : " is", " silent", after,
                      " and to a ping (stopped, hung or unreachable)");
  } else if (culprit >= 0 && culprit != rank()) {
    reason = Message(RankName(culprit), " did not take part", after,
                     "; it is alive and ", peers_[culprit].pong_text);
  } else {
    culprit = rank();
    reason = Message(RankName(culprit), " did not finish", after);
  }
  lock.unlock();
  Fail(culprit, absl::StatusCode::kUnavailable, reason);
}

int ProcessGroup::PeerOutside(uint64_t ping) const {
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peers_[peer].pong == ping && peers_[peer].pong_outside) return peer;
  }
  return -1;
}

std::string ProcessGroup::DescribeRunning() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const auto& operation : running_) {
    if (text.size() > 600) return text + ", ...";
    text += (text.empty() ? "" : ", ") + operation->Describe();
  }
  return text;
}

}  // namespace tfdist
