// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/inbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "custom_ops/comm/socket.h"
#include "custom_ops/common/message.h"

namespace tfdist {

namespace {

// A payload of at most this size almost always arrives with its header. The
// receiver is then notified only once, for both.
constexpr uint64_t kWithHeader = uint64_t{64} << 10;
// Limit of messages without a receiver. A rank may be ahead of another by the
// exchanges of a step, or by broadcasts.
constexpr size_t kMostMessages = size_t{1} << 17;

}  // namespace

Incoming* Inbox::Expect(uint32_t generation, int64_t tag, uint64_t call,
                        uint32_t part, std::shared_ptr<Progress> receiver) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Incoming>& message = messages_[{generation, tag, call, part}];
  if (message == nullptr) {
    message = std::make_unique<Incoming>();
    message->header.generation = generation;
    message->header.tag = tag;
    message->header.call = call;
    message->header.part = part;
  }
  message->receiver = std::move(receiver);
  return message.get();
}

void Inbox::Remove(Incoming* message) {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [&] { return !message->busy; });
  if (message->header_here && !message->complete()) {
    message->abandoned = true;
    message->receiver = nullptr;
    message->memory = nullptr;
    return;
  }
  UncountEarly(message);
  messages_.erase(KeyOf(message->header));
}

bool Inbox::HasHeader(const Incoming* message) {
  std::lock_guard<std::mutex> lock(mutex_);
  return message->header_here;
}

uint64_t Inbox::Received(const Incoming* message) {
  std::lock_guard<std::mutex> lock(mutex_);
  return message->received;
}

bool Inbox::Give(Incoming* message, void* memory, uint64_t bytes) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (message->header_here && message->header.bytes != bytes) return false;
  idle_.wait(lock, [&] { return !message->busy; });
  message->memory = static_cast<uint8_t*>(memory);
  message->wanted = bytes;
  UncountEarly(message);
  if (message->early == nullptr) return true;
  const std::shared_ptr<uint8_t> early = std::move(message->early);
  const uint64_t size = message->received;
  message->busy = size > 0;  // no other thread may write meanwhile
  lock.unlock();
  if (size == 0) return true;
  std::memcpy(memory, early.get(), size);
  lock.lock();
  message->busy = false;
  idle_.notify_all();
  return true;
}

std::shared_ptr<uint8_t> Inbox::TakeEarly(Incoming* message) {
  std::lock_guard<std::mutex> lock(mutex_);
  EarlyMemory(message);
  UncountEarly(message);
  return message->early;
}

void Inbox::Retire(uint32_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = messages_.begin(); it != messages_.end();) {
    Incoming& message = *it->second;
    const bool old = message.header.generation < generation;
    const bool free = message.receiver == nullptr && message.complete();
    if (old && free) UncountEarly(&message);
    it = old && free ? messages_.erase(it) : std::next(it);
  }
  generation_ = generation;
}

Incoming* Inbox::Begin(const Header& header) {
  std::shared_ptr<Progress> receiver;
  Incoming* found = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Incoming>& message = messages_[KeyOf(header)];
    if (message == nullptr) {
      message = std::make_unique<Incoming>();
      if (messages_.size() > kMostMessages) {
        throw ProtocolError(
            Message("it sent ", kMostMessages,
                    " messages that this rank does not expect"));
      }
    }
    if (message->header_here) return nullptr;
    const bool fits = message->memory == nullptr || message->abandoned ||
                      message->wanted == header.bytes;
    if (!fits) return nullptr;
    message->header = header;
    message->header_here = true;
    found = message.get();
    const bool more_at_once = header.bytes > 0 && header.bytes <= kWithHeader;
    if (!more_at_once) receiver = message->receiver;
  }
  if (receiver != nullptr) receiver->Advance();
  return found;
}

uint8_t* Inbox::Claim(Incoming* message) {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [&] { return !message->busy; });  // Give may be copying
  uint8_t* memory = message->memory;
  if (memory == nullptr) {
    if (message->early == nullptr) CountEarly(message);
    memory = EarlyMemory(message);
  }
  message->busy = true;
  return memory + message->received;
}

void Inbox::Advance(Incoming* message, uint64_t bytes) {
  std::shared_ptr<Progress> receiver;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    message->busy = false;
    message->received += bytes;
    receiver = message->receiver;
    const bool old = message->header.generation < generation_;
    const bool cancelled_for =
        message->abandoned || (old && message->receiver == nullptr);
    if (cancelled_for && message->complete()) {
      UncountEarly(message);
      messages_.erase(KeyOf(message->header));
    }
    idle_.notify_all();
  }
  if (receiver != nullptr) receiver->Advance();
}

void Inbox::CountEarly(Incoming* message) {
  const uint64_t bytes = message->header.bytes;
  if (bytes > most_early_ - early_bytes_) {
    throw ProtocolError(Message("it sent more than ", most_early_,
                                " bytes that this rank has not asked for yet"));
  }
  message->early_bytes = bytes;
  early_bytes_ += bytes;
}

void Inbox::UncountEarly(Incoming* message) {
  early_bytes_ -= std::exchange(message->early_bytes, 0);
}

uint8_t* Inbox::EarlyMemory(Incoming* message) {
  if (message->early == nullptr) {
    const uint64_t bytes = std::max<uint64_t>(message->header.bytes, 1);
    message->early = scratch_.Acquire(bytes);
  }
  return message->early.get();
}

}  // namespace tfdist
