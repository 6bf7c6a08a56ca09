// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/control_link.h"

#include "custom_ops/comm/clock.h"

namespace tfdist {

bool ControlLink::Send(const ControlFrame& frame) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (queue_.size() >= kMostWaiting && frame.type != Control::kAbort) {
    throw ProtocolError("it does not read its control messages");
  }
  queue_.push_back(frame);
  return queue_.size() > 1 || Write();
}

bool ControlLink::OnWritable() {
  std::lock_guard<std::mutex> lock(mutex_);
  return Write();
}

bool ControlLink::Write() {
  while (!queue_.empty()) {
    auto* frame = reinterpret_cast<uint8_t*>(&queue_.front());
    const iovec part = {frame + offset_, sizeof(ControlFrame) - offset_};
    const size_t written = socket_.Write(&part, 1);
    if (written == 0) return true;
    offset_ += written;
    if (offset_ < sizeof(ControlFrame)) continue;
    offset_ = 0;
    queue_.pop_front();
  }
  return false;
}

bool ControlLink::OnReadable(const std::function<void(ControlFrame&)>& take) {
  for (int frames = 0; frames < kTurn;) {
    auto* frame = reinterpret_cast<uint8_t*>(&frame_);
    const iovec part = {frame + received_, sizeof(ControlFrame) - received_};
    const size_t size = socket_.Read(&part, 1);
    if (size == 0) return false;
    last_heard_.store(Now());
    received_ += size;
    if (received_ < sizeof(ControlFrame)) continue;
    received_ = 0;
    if (frame_.magic != kMagic) {
      throw ProtocolError(
          "it sent an unknown control message. Use the same version of "
          "tfdist_ext on all ranks");
    }
    take(frame_);
    ++frames;
  }
  return true;
}

}  // namespace tfdist
