// SPDX-License-Identifier: Apache-2.0
// Leaving a generation, and the reasons for it.
#include <algorithm>

#include "custom_ops/comm/process_group.h"
#include "custom_ops/common/message.h"

namespace tfdist {

namespace {

// Limit of generations that have ended on this rank or a peer but that some
// rank has not left yet.
constexpr size_t kMostCauses = 1024;

}  // namespace

void ProcessGroup::Leave(const std::string& reason) {
  ControlFrame leave;
  leave.type = Control::kLeave;
  leave.rank = rank();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed() || closing_ || !started_) return;
    leave.nonce = generation_++;
    cause_reported_ = false;
    // The first reason applies to all ranks.
    const auto cause =
        causes_.emplace(leave.nonce, Message(RankName(rank()), ": ", reason));
    SetText(leave.text, cause.first->second.c_str());
    channels_.clear();
  }
  SendControlToAll(leave);
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) transport_.inbox(peer).Retire(leave.nonce + 1);
  }
}

void ProcessGroup::OnLeave(int peer, ControlFrame& frame) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto generation = static_cast<uint32_t>(frame.nonce);
  causes_.emplace(generation, GetText(frame.text));
  peers_[peer].generation = generation + 1;
  ForgetCauses();
  if (causes_.size() > kMostCauses) {
    throw ProtocolError(
        Message("it reported more than ", kMostCauses,
                " failures, while other ranks are still at the first"));
  }
}

std::pair<std::string, bool> ProcessGroup::LeaveReason() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto cause = causes_.find(generation_);
  if (failed() || cause == causes_.end()) return {"", false};
  return {cause->second, cause_reported_};
}

uint32_t ProcessGroup::generation() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return generation_;
}

bool ProcessGroup::Stale(const Operation& operation) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return operation.generation != generation_;
}

void ProcessGroup::ForgetCauses() {
  uint32_t oldest = generation_;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) oldest = std::min(oldest, peers_[peer].generation);
  }
  for (const auto& operation : running_) {
    oldest = std::min(oldest, operation->generation);
  }
  causes_.erase(causes_.begin(), causes_.lower_bound(oldest));
}

}  // namespace tfdist
