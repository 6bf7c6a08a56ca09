// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/data_link.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "custom_ops/comm/clock.h"
#include "custom_ops/common/message.h"

namespace tfdist {

namespace {

constexpr int kMostParts = 32;  // limit of parts per system call

iovec Part(const void* data, size_t bytes) {
  return {const_cast<void*>(data), bytes};
}

}  // namespace

bool DataLink::Send(Outgoing* message) {
  std::unique_lock<std::mutex> lock(mutex_);
  queue_.push_back(message);
  if (writing_) return false;  // the thread that writes sends it too
  // A queued message is sent after those before it.
  return queue_.size() > 1 || WriteQueue(lock);
}

bool DataLink::OnWritable() {
  std::unique_lock<std::mutex> lock(mutex_);
  accepts_bytes_ =
      true;  // also tells a thread that writes and has just found no space
  return !writing_ && WriteQueue(lock);
}

size_t DataLink::Write(const iovec* parts, int count) {
  return rings_ ? rings_->Write(parts, count) : socket_.Write(parts, count);
}

size_t DataLink::Read(const iovec* parts, int count) {
  return rings_ ? rings_->Read(parts, count) : socket_.Read(parts, count);
}

void DataLink::OnEnd() {
  uint8_t byte;
  const iovec part = Part(&byte, 1);
  if (socket_.Read(&part, 1) > 0) {
    throw ProtocolError(
        "it sent bytes on the connection, although its messages go through "
        "shared "
        "memory");
  }
}

bool DataLink::WriteQueue(std::unique_lock<std::mutex>& lock) {
  writing_ = true;
  accepts_bytes_ = true;
  while (!broken_ && !queue_.empty() && accepts_bytes_) {
    accepts_bytes_ = false;
    size_t written = 0;
    iovec parts[kMostParts];
    const int count = Gather(parts);
    lock.unlock();
    std::exception_ptr lost;
    try {
      written = Write(parts, count);
    } catch (...) {
      lost = std::current_exception();
    }
    lock.lock();
    in_write_ = 0;
    if (written > 0) {
      PopSent(written);
      accepts_bytes_ = true;
    }
    if (lost != nullptr) {
      writing_ = false;
      written_.notify_all();
      std::rethrow_exception(lost);
    }
  }
  writing_ = false;
  written_.notify_all();
  return !broken_ && !queue_.empty();
}

// Collects the part of the queue that the next system call sends.
int DataLink::Gather(iovec* parts) {
  int count = 0;
  for (const Outgoing* message : queue_) {
    if (count + 2 > kMostParts) break;
    ++in_write_;
    const uint64_t payload_sent =
        std::max<uint64_t>(message->offset, sizeof(Header)) - sizeof(Header);
    if (message->offset < sizeof(Header)) {
      const auto* header = reinterpret_cast<const uint8_t*>(&message->header);
      parts[count++] =
          Part(header + message->offset, sizeof(Header) - message->offset);
    }
    if (payload_sent < message->header.bytes) {
      parts[count++] = Part(message->payload + payload_sent,
                            message->header.bytes - payload_sent);
    }
  }
  return count;
}

// Removes sent messages from the queue.
void DataLink::PopSent(size_t written) {
  Moved();
  ++writes_;
  while (written > 0) {
    Outgoing* message = queue_.front();
    const uint64_t part =
        std::min<uint64_t>(written, message->size() - message->offset);
    message->offset += part;
    written -= part;
    if (message->offset < message->size()) break;
    queue_.pop_front();
    // The sender may release the message from here on.
    const std::shared_ptr<Progress> sender = std::move(message->sender);
    message->sent.store(true, std::memory_order_release);
    if (sender != nullptr) sender->Advance();
  }
}

bool DataLink::Withdraw(Outgoing* message, bool broken) {
  std::unique_lock<std::mutex> lock(mutex_);
  broken_ = broken_ || broken;
  // A thread that is writing still reads the message.
  if (broken_) written_.wait(lock, [&] { return !writing_; });
  const auto found = std::find(queue_.begin(), queue_.end(), message);
  if (found == queue_.end()) return true;
  const auto place = static_cast<size_t>(found - queue_.begin());
  const bool begun = message->offset > 0 || place < in_write_;
  if (begun && !broken) return false;
  queue_.erase(found);
  return true;
}

bool DataLink::OnReadable() {
  for (size_t taken = 0; taken < kTurn;) {
    if (current_ == nullptr && TakeHeader()) continue;
    const size_t size = current_ != nullptr ? ReadPayload() : ReadStaged();
    if (size == 0) return false;
    taken += size;
  }
  return true;
}

// Takes a header from the staged bytes. Returns false if it is incomplete.
bool DataLink::TakeHeader() {
  if (end_ - begin_ < sizeof(Header)) return false;
  Header header;
  std::memcpy(&header, staged_.data() + begin_, sizeof(Header));
  begin_ += sizeof(Header);
  if (header.magic != kMagic || header.bytes > kMostBytes) {
    throw ProtocolError(
        "it sent a message with an unknown header. Use the same version of "
        "tfdist_ext on all ranks");
  }
  Incoming* message = inbox_.Begin(header);
  if (message == nullptr) {
    throw ProtocolError(
        Message("it sent a duplicate message or one of the wrong size (",
                KindName(header.kind), " '", GetText(header.label), "')"));
  }
  if (header.bytes > 0) {
    current_ = message;
    left_ = header.bytes;
  }
  return true;
}

// Reads the payload, first from the staged bytes and then from the connection.
// The read continues past the payload into the staging memory, because the same
// system call usually returns the next header as well.
size_t DataLink::ReadPayload() {
  uint8_t* memory = inbox_.Claim(current_);
  size_t got = std::min<uint64_t>(end_ - begin_, left_);
  size_t taken = got;
  if (got > 0) {
    std::memcpy(memory, staged_.data() + begin_, got);
    begin_ += got;
  } else {
    const size_t wanted = std::min<uint64_t>(left_, kRead);
    const iovec parts[] = {Part(memory, wanted),
                           Part(staged_.data(), staged_.size())};
    begin_ = end_ = 0;
    try {
      taken = Read(parts, wanted == left_ ? 2 : 1);
    } catch (...) {
      inbox_.Advance(current_, 0);
      throw;
    }
    got = std::min(taken, wanted);
    end_ = taken - got;
    if (taken > 0) Moved();
  }
  left_ -= got;
  Incoming* message = current_;
  if (left_ == 0) current_ = nullptr;
  inbox_.Advance(message, got);  // the message may be released afterwards
  return taken;
}

size_t DataLink::ReadStaged() {
  std::memmove(staged_.data(), staged_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
  const iovec part = Part(staged_.data() + end_, staged_.size() - end_);
  const size_t size = Read(&part, 1);
  end_ += size;
  if (size > 0) Moved();
  return size;
}

void DataLink::Moved() { last_moved_.store(Now()); }

}  // namespace tfdist
