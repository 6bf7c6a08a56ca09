// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>

#include "custom_ops/comm/clock.h"
#include "custom_ops/comm/process_group.h"
#include "custom_ops/common/message.h"

namespace tfdist {

namespace {

// Limit of keys of a group, of up to 1 kB each.
constexpr size_t kMostKeys = 4096;
constexpr double kSlice = 0.5;  // seconds

ControlFrame KeyFrame(Control type, int rank, uint64_t nonce) {
  ControlFrame frame;
  frame.type = type;
  frame.rank = rank;
  frame.nonce = nonce;
  return frame;
}

// Stores key and value, each with a terminating zero byte. Returns false if
// they do not fit.
bool SetPair(ControlFrame& frame, const std::string& key,
             const std::string& value) {
  if (key.size() + value.size() + 2 > sizeof(frame.text)) return false;
  std::memcpy(frame.text, key.c_str(), key.size() + 1);
  std::memcpy(frame.text + key.size() + 1, value.c_str(), value.size() + 1);
  return true;
}

absl::Status Taken(const std::string& key) {
  return absl::AlreadyExistsError(Message("key '", key, "' has a value"));
}

std::pair<std::string, std::string> GetPair(ControlFrame& frame) {
  const std::string key = GetText(frame.text);
  const size_t rest = std::min(key.size() + 1, sizeof(frame.text) - 1);
  return {key, frame.text + rest};
}

}  // namespace

absl::Status ProcessGroup::InsertKey(const std::string& key,
                                     const std::string& value) {
  ControlFrame frame = KeyFrame(Control::kInsert, rank(), 0);
  const bool clean = key.find('\0') == std::string::npos &&
                     value.find('\0') == std::string::npos;
  if (key.empty() || !clean || !SetPair(frame, key, value)) {
    return absl::InvalidArgumentError(
        Message("a key and its value must have 1 to ", sizeof(frame.text) - 2,
                " bytes together, none of them 0; received ", key.size(),
                " and ", value.size()));
  }
  if (rank() == 0) return Insert(key, value);
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t number = frame.nonce = ++inserts_;
  const auto request = inserted_.emplace(number, std::nullopt).first;
  lock.unlock();
  SendControl(0, frame);
  lock.lock();
  WaitFor(lock, options_.timeout,
          [&] { return failed() || closing_ || request->second.has_value(); });
  const std::optional<bool> is_new = request->second;
  inserted_.erase(request);
  if (!is_new.has_value()) {
    return absl::UnavailableError(Message("rank ", rank(), ": no answer from ",
                                          RankName(0), " about key '", key, "'",
                                          failed() ? ": " + failure_ : ""));
  }
  return *is_new ? absl::OkStatus() : Taken(key);
}

void ProcessGroup::WaitFor(std::unique_lock<std::mutex>& lock, double seconds,
                           const std::function<bool()>& over) {
  for (double left = seconds; left > 0 && !over(); left -= kSlice) {
    const double slice = std::min(left, kSlice);
    changed_.wait_for(lock, std::chrono::nanoseconds(Nanoseconds(slice)), over);
  }
}

absl::StatusOr<std::string> ProcessGroup::AwaitKey(const std::string& key,
                                                   double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto there = [&] {
    return failed() || closing_ || keys_.count(key) > 0;
  };
  if (seconds > 0) {
    WaitFor(lock, seconds, there);
  } else {
    changed_.wait(lock, there);
  }
  const auto found = keys_.find(key);
  if (found != keys_.end()) return found->second;
  const std::string what =
      Message("rank ", rank(), ": no rank has set the key '", key, "'");
  if (failed()) return absl::UnavailableError(what + ": " + failure_);
  if (closing_) return absl::CancelledError(what + ": the group is closed");
  return absl::DeadlineExceededError(Message(what, " within ", seconds, " s"));
}

// Runs on rank 0: stores the key if it is new, and then sends it to all ranks.
absl::Status ProcessGroup::Insert(const std::string& key,
                                  const std::string& value) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (keys_.count(key) > 0) return Taken(key);
    if (keys_.size() == kMostKeys) {
      return absl::ResourceExhaustedError(Message(
          "the ranks have already set ", kMostKeys, " keys, the maximum"));
    }
    keys_.emplace(key, value);
  }
  changed_.notify_all();
  ControlFrame frame = KeyFrame(Control::kValue, rank(), 0);
  SetPair(frame, key, value);
  for (int peer = 1; peer < world_size(); ++peer) SendControl(peer, frame);
  return absl::OkStatus();
}

void ProcessGroup::OnKey(int peer, ControlFrame& frame) {
  const auto [key, value] = GetPair(frame);
  if (frame.type == Control::kInsert) {
    ControlFrame answer = KeyFrame(Control::kInserted, rank(), frame.nonce);
    if (rank() != 0)
      throw ProtocolError("it asked a rank other than 0 to set a key");
    const absl::Status inserted = Insert(key, value);
    if (absl::IsResourceExhausted(inserted)) {
      throw ProtocolError(std::string(inserted.message()));
    }
    answer.code = inserted.ok() ? 0 : 1;
    SendControl(peer, answer);
    return;
  }
  if (peer != 0)
    throw ProtocolError(
        "it sent a reply about a key, which only rank 0 may send");
  std::lock_guard<std::mutex> lock(mutex_);
  if (frame.type == Control::kInserted) {
    // The caller may have stopped waiting for this request.
    const auto request = inserted_.find(frame.nonce);
    if (request != inserted_.end()) request->second = frame.code == 0;
  } else if (keys_.size() < kMostKeys) {
    keys_.emplace(key, value);
  } else {
    throw ProtocolError(Message("it has set more than ", kMostKeys, " keys"));
  }
  changed_.notify_all();
}

}  // namespace tfdist
