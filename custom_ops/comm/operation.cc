// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/operation.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "custom_ops/comm/channel.h"
#include "custom_ops/comm/clock.h"
#include "custom_ops/comm/process_group.h"
#include "custom_ops/common/message.h"

namespace tfdist {

using std::chrono_literals::operator""us;

namespace {

// How long an operation between GPUs may continue after it was aborted.
constexpr int64_t kMaxTimeAborted = 1'000'000'000;

}  // namespace

Operation::Operation(std::shared_ptr<ProcessGroup> group, Kind kind,
                     int64_t tag, std::string label)
    : group(std::move(group)),
      kind(kind),
      tag(tag),
      label(std::move(label)),
      start(Now()) {}

void Operation::Send(int peer, const Header& header, const void* payload) {
  sent_.emplace_back();
  sent_.back().peer = peer;
  Outgoing& message = sent_.back().message;
  message.header = header;
  message.header.kind = kind;
  message.header.generation = generation;
  message.header.tag = tag;
  message.header.call = channel->calls;
  SetText(message.header.label, label.c_str());
  message.payload = static_cast<const uint8_t*>(payload);
  message.sender = shared_from_this();
  try {
    group->transport().Send(peer, &message);
  } catch (const std::exception&) {
    group->OnConnectionError(peer);
    throw OperationError(group->FailureOf(*this), true);
  }
  bytes_sent += message.size();
  group->CountSent(message.size());
}

Incoming* Operation::Expect(int peer, uint32_t part) {
  Incoming* message = group->transport().inbox(peer).Expect(
      generation, tag, channel->calls, part, shared_from_this());
  received_.push_back({peer, message});
  return message;
}

void Operation::Give(int peer, Incoming* message, void* memory,
                     uint64_t bytes) {
  if (group->transport().inbox(peer).Give(message, memory, bytes)) return;
  group->Fail(peer, absl::StatusCode::kInternal,
              Message(group->RankName(peer), " sent ", message->header.bytes,
                      " bytes for a part of ", Name(), ", expected ", bytes,
                      ". Use the same version of tfdist_ext on all ranks"));
  throw OperationError(group->FailureOf(*this), true);
}

uint8_t* Operation::TakeEarly(int peer, Incoming* message) {
  Keep(group->transport().inbox(peer).TakeEarly(message));
  return scratch_.back().get();
}

void Operation::AwaitHeader(int peer, Incoming* message, const char* stage) {
  WaitForRanks(stage, [&] { return HasHeader(peer, message) ? -1 : peer; });
  CountHeader(message);
}

void Operation::AwaitHeaders(
    const std::vector<std::pair<int, Incoming*>>& messages,
    const std::function<bool(const Header&)>& ends, const char* stage) {
  WaitForRanks(stage, [&] {
    int missing = -1;
    for (const auto& [peer, message] : messages) {
      if (!HasHeader(peer, message)) {
        if (missing < 0) missing = peer;
      } else if (ends(message->header)) {
        return -1;
      }
    }
    return missing;
  });
  for (const auto& [peer, message] : messages) {
    if (HasHeader(peer, message)) CountHeader(message);
  }
}

bool Operation::HasHeader(int peer, const Incoming* message) const {
  return group->transport().inbox(peer).HasHeader(message);
}

void Operation::CountHeader(const Incoming* message) {
  const uint64_t bytes = sizeof(Header) + message->header.bytes;
  bytes_received += bytes;
  group->CountReceived(bytes);
}

bool Operation::AwaitHeaderUntil(int64_t end, int peer, Incoming* message) {
  Inbox& inbox = group->transport().inbox(peer);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, std::chrono::nanoseconds(end - Now()),
                    [&] { return aborted_ || inbox.HasHeader(message); });
  if (inbox.HasHeader(message)) return true;
  if (!aborted_) return false;
  lock.unlock();
  throw OperationError(group->FailureOf(*this), group->failed());
}

void Operation::AwaitBytes(int peer, Incoming* message, uint64_t bytes,
                           const char* stage) {
  Inbox& inbox = group->transport().inbox(peer);
  Wait(stage, [&] { return inbox.Received(message) >= bytes ? -1 : peer; });
}

void Operation::AwaitSent(const char* stage) {
  for (const Sent& sent : sent_) {
    Wait(stage, [&] {
      const bool gone = sent.message.sent.load(std::memory_order_acquire);
      return gone ? -1 : sent.peer;
    });
  }
}

void Operation::AwaitLocal(const std::function<bool()>& over,
                           const char* stage) {
  Wait(stage, [&] { return over() ? -1 : group->rank(); });
}

// `missing` is called again after each header, so `peer_` is finally the rank
// whose header arrived last.
void Operation::WaitForRanks(const char* stage,
                             const std::function<int()>& missing) {
  // A server that has nothing to do does not wait for a rank, nor does the
  // program wait for what a thread saves.
  if (background) return Wait(stage, missing);
  const int first = missing();
  if (first < 0) return;
  const auto end = [&] {
    const int last = waiting_for();
    group->EndWait(last < 0 ? first : last);
  };
  group->BeginWait();
  try {
    Wait(stage, missing);
  } catch (...) {
    end();
    throw;
  }
  end();
}

void Operation::AwaitDevice(const std::function<bool()>& over,
                            const char* stage) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stage_ = stage;
    peer_ = -1;
  }
  on_device_since_ = Now();
  int64_t end = 0;
  for (int looks = 0; !over(); ++looks) {
    std::unique_lock<std::mutex> lock(mutex_);
    // The first exchanges of a step complete within microseconds.
    const auto pause = looks < 64 ? 1us : looks < 1024 ? 20us : 500us;
    if (!aborted_) {
      changed_.wait_for(lock, pause);
      continue;
    }
    lock.unlock();
    if (end == 0) end = Now() + kMaxTimeAborted;
    if (!group->failed() && Now() < end) {
      std::this_thread::sleep_for(pause);
      continue;
    }
    group->Fail(group->rank(), absl::StatusCode::kUnavailable,
                std::string(group->FailureOf(*this).message()));
    throw OperationError(group->FailureOf(*this), true);
  }
  on_device_since_ = 0;
}

void Operation::Wait(const char* stage, const std::function<int()>& missing) {
  std::unique_lock<std::mutex> lock(mutex_);
  stage_ = stage;
  missing_ = &missing;
  changed_.wait(lock, [&] { return Over() || aborted_ || HasStray(); });
  const bool over = Over();
  missing_ = nullptr;
  if (over) return;  // a complete wait succeeds even if a rank has left since
  lock.unlock();
  if (HasStray()) throw Stray();
  throw OperationError(group->FailureOf(*this), group->failed());
}

bool Operation::Over() {
  const int peer = (*missing_)();
  if (peer >= 0) peer_ = peer;
  return peer < 0;
}

bool Operation::HasStray() const {
  return std::any_of(strays_.begin(), strays_.end(), [&](const auto& stray) {
    return HasHeader(stray.first, stray.second);
  });
}

std::vector<int64_t> Operation::SentTo() const {
  std::vector<int64_t> bytes(group->world_size());
  for (const Sent& sent : sent_) bytes[sent.peer] += sent.message.size();
  return bytes;
}

std::vector<int64_t> Operation::ReceivedFrom() const {
  std::vector<int64_t> bytes(group->world_size());
  for (const Received& received : received_) {
    if (!HasHeader(received.peer, received.message)) continue;
    bytes[received.peer] += sizeof(Header) + received.message->header.bytes;
  }
  return bytes;
}

void Operation::Release() {
  for (Sent& sent : sent_) {
    const auto gone = [&] {
      return sent.message.sent.load(std::memory_order_acquire);
    };
    const auto taken_back = [&] {
      const bool failed = group->failed();
      if (given_up() && !failed) return false;
      return group->transport().Withdraw(sent.peer, &sent.message, failed);
    };
    while (!gone() && !taken_back()) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return gone() || group->failed(); });
    }
  }
  for (const Received& received : received_) {
    group->transport().inbox(received.peer).Remove(received.message);
  }
  sent_.clear();
  received_.clear();
  scratch_.clear();
  tensors_.clear();
}

// Wakes the waiting thread only if its wait is over, because waking a thread
// takes more time than this check.
void Operation::Advance() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (missing_ != nullptr && !Over() && !HasStray()) return;
  }
  changed_.notify_all();
}

void Operation::Abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  changed_.notify_all();
}

void Operation::Cancel() { cancelled_ = true; }

void Operation::GiveUp() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = given_up_ = true;
  changed_.notify_all();
}

bool Operation::given_up() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return given_up_;
}

bool Operation::WaitsFor(int peer) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return missing_ != nullptr && (*missing_)() == peer;
}

int Operation::waiting_for() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return peer_;
}

std::string Operation::Name() const {
  return Message(KindName(kind), " '", label, "'");
}

std::string Operation::Describe() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return Message(KindName(kind), " '", label, "' (tag ", tag, ", stage ",
                 stage_, peer_ >= 0 ? Message(", rank ", peer_) : "", ")");
}

}  // namespace tfdist
