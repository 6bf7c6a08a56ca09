// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/collective/operation.h"

#include <utility>

#include "custom_ops/collective/process_group.h"
#include "custom_ops/common/message.h"

namespace tfdist {

namespace {

// Gloo closes every connection when a wait of its own times out, which would
// hide who was silent. The group's watchdog ends waits instead.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(1000);
// A wait that was aborted may have been over: Gloo looks at the abort first.
// The watchdog aborts again and again, so what has come is seen at the next
// try.
constexpr int kTries = 4;

}  // namespace

Operation::Operation(std::shared_ptr<ProcessGroup> group, Kind kind,
                     int64_t tag, std::string label)
    : group(std::move(group)),
      kind(kind),
      tag(tag),
      label(std::move(label)),
      start(Clock::now()) {}

Buffer* Operation::MakeBuffer(void* data, size_t total) {
  buffers_.push_back(group->context().createUnboundBuffer(data, total));
  return buffers_.back().get();
}

Buffer* Operation::Send(int peer, Stream stream, const void* data,
                        size_t bytes) {
  Buffer* buffer = MakeBuffer(const_cast<void*>(data), bytes);
  PostSend(buffer, peer, stream, 0, bytes);
  return buffer;
}

Buffer* Operation::Receive(int peer, Stream stream, void* data, size_t bytes) {
  Buffer* buffer = MakeBuffer(data, bytes);
  PostReceive(buffer, peer, stream, 0, bytes);
  return buffer;
}

void Operation::PostSend(Buffer* buffer, int peer, Stream stream, size_t offset,
                         size_t bytes) {
  try {
    buffer->send(peer, SlotOf(generation, tag, stream), offset, bytes);
  } catch (const std::exception& error) {
    group->OnBrokenPeer(peer, error.what());
    throw OperationError(group->FailureOf(*this), true);
  }
  bytes_sent += bytes;
  group->CountSent(bytes);
}

void Operation::PostReceive(Buffer* buffer, int peer, Stream stream,
                            size_t offset, size_t bytes) {
  try {
    buffer->recv(peer, SlotOf(generation, tag, stream), offset, bytes);
  } catch (const std::exception& error) {
    group->OnBrokenPeer(peer, error.what());
    throw OperationError(group->FailureOf(*this), true);
  }
}

void Operation::WaitReceive(Buffer* buffer, int peer, const char* stage) {
  Wait(buffer, true, peer, stage);
}

void Operation::WaitSend(Buffer* buffer, int peer, const char* stage) {
  Wait(buffer, false, peer, stage);
}

void Operation::Wait(Buffer* buffer, bool receive, int peer,
                     const char* stage) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    peer_ = peer;
    stage_ = stage;
    current_ = buffer;
    current_receives_ = receive;
  }
  // Whoever fails the group first marks it and then aborts what is current, so
  // either this check or the abort is seen.
  bool completed = false;
  std::string error;
  for (int i = 0; i < kTries && !completed && error.empty(); ++i) {
    if (group->failed()) break;
    try {
      completed = receive ? buffer->waitRecv(nullptr, kForever)
                          : buffer->waitSend(nullptr, kForever);
    } catch (const std::exception& exception) {
      error = exception.what();
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    current_ = nullptr;
  }
  if (completed) return;
  if (!error.empty()) group->OnBrokenPeer(peer, error);
  throw OperationError(group->FailureOf(*this), group->failed());
}

void Operation::Release() {
  buffers_.clear();
  scratch_.clear();
  tensors_.clear();
}

void Operation::Abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (current_ == nullptr) return;
  if (current_receives_) {
    current_->abortWaitRecv();
  } else {
    current_->abortWaitSend();
  }
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
