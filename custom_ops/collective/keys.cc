// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>

#include "custom_ops/collective/clock.h"
#include "custom_ops/collective/process_group.h"
#include "custom_ops/common/message.h"

namespace tfdist {

namespace {

ControlFrame KeyFrame(Control type, int rank, uint64_t nonce) {
  ControlFrame frame;
  frame.type = type;
  frame.rank = rank;
  frame.nonce = nonce;
  return frame;
}

// Key and value, each terminated; false if they do not fit.
bool SetPair(ControlFrame& frame, const std::string& key,
             const std::string& value) {
  if (key.size() + value.size() + 2 > sizeof(frame.text)) return false;
  std::memcpy(frame.text, key.c_str(), key.size() + 1);
  std::memcpy(frame.text + key.size() + 1, value.c_str(), value.size() + 1);
  return true;
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
  const auto taken = [&] {
    return absl::AlreadyExistsError(Message("key '", key, "' has a value"));
  };
  if (rank() == 0) return Insert(key, value) ? absl::OkStatus() : taken();
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t number = frame.nonce = ++inserts_;
  lock.unlock();
  SendControl(0, frame);
  lock.lock();
  changed_.wait_for(
      lock, std::chrono::nanoseconds(Nanoseconds(options_.timeout)),
      [&] { return failed() || closing_ || inserted_.count(number) > 0; });
  const auto answer = inserted_.find(number);
  if (answer == inserted_.end()) {
    return absl::UnavailableError(Message("rank ", rank(), ": no answer from ",
                                          RankName(0), " about key '", key, "'",
                                          failed() ? ": " + failure_ : ""));
  }
  const bool is_new = answer->second;
  inserted_.erase(answer);
  return is_new ? absl::OkStatus() : taken();
}

absl::StatusOr<std::string> ProcessGroup::AwaitKey(const std::string& key,
                                                   double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto there = [&] {
    return failed() || closing_ || keys_.count(key) > 0;
  };
  if (seconds > 0) {
    changed_.wait_for(lock, std::chrono::nanoseconds(Nanoseconds(seconds)),
                      there);
  } else {
    changed_.wait(lock, there);
  }
  const auto found = keys_.find(key);
  if (found != keys_.end()) return found->second;
  const std::string what =
      Message("rank ", rank(), ": nobody has set the key '", key, "'");
  if (failed()) return absl::UnavailableError(what + ": " + failure_);
  if (closing_) return absl::CancelledError(what + ": the group is closed");
  return absl::DeadlineExceededError(Message(what, " within ", seconds, " s"));
}

// On rank 0: returns whether the key is new, and then tells all.
bool ProcessGroup::Insert(const std::string& key, const std::string& value) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!keys_.emplace(key, value).second) return false;
  }
  changed_.notify_all();
  ControlFrame frame = KeyFrame(Control::kValue, rank(), 0);
  SetPair(frame, key, value);
  for (int peer = 1; peer < world_size(); ++peer) SendControl(peer, frame);
  return true;
}

void ProcessGroup::OnKey(int peer, ControlFrame& frame) {
  const auto [key, value] = GetPair(frame);
  if (frame.type == Control::kInsert) {
    ControlFrame answer = KeyFrame(Control::kInserted, rank(), frame.nonce);
    answer.code = rank() == 0 && Insert(key, value) ? 0 : 1;
    SendControl(peer, answer);
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (frame.type == Control::kInserted) {
    inserted_[frame.nonce] = frame.code == 0;
  } else {
    keys_.emplace(key, value);
  }
  changed_.notify_all();
}

}  // namespace tfdist
