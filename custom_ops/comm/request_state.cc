// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/request_state.h"

#include <algorithm>
#include <utility>

namespace tfdist {

bool OwnMessage::HasReply() {
  std::lock_guard<std::mutex> lock(mutex);
  return replied;
}

void OwnMessage::SetReply(const tensorflow::Tensor& values,
                          const std::string& text) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    replied = true;
    reply = values;
    error = text;
  }
  request->Advance();
}

bool Served::HasReply() {
  std::lock_guard<std::mutex> lock(mutex);
  return replied;
}

void RequestState::Push(int64_t queue, std::shared_ptr<OwnMessage> message) {
  std::shared_ptr<Operation> operation;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    OwnQueue& own = own_[queue];
    own.messages.push_back(std::move(message));
    operation = own.operation;
  }
  if (operation != nullptr) operation->Advance();
}

void RequestState::Await(int64_t queue, std::shared_ptr<Operation> operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  own_[queue].operation = std::move(operation);
}

std::shared_ptr<OwnMessage> RequestState::Pop(int64_t queue,
                                              uint32_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& messages = own_[queue].messages;
  while (!messages.empty()) {
    std::shared_ptr<OwnMessage> first = messages.front();
    if (first->generation > generation) return nullptr;
    messages.pop_front();
    if (first->generation == generation) return first;
  }
  return nullptr;
}

void RequestState::SetServed(int64_t queue, std::shared_ptr<Served> served) {
  std::lock_guard<std::mutex> lock(mutex_);
  served_[queue] = std::move(served);
}

std::shared_ptr<Served> RequestState::TakeServed(int64_t queue) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = served_.find(queue);
  if (found == served_.end()) return nullptr;
  std::shared_ptr<Served> served = std::move(found->second);
  served_.erase(found);
  return served;
}

std::vector<Server> RequestState::SetHandler(int64_t tag, int64_t handler) {
  std::vector<Server> stopped;
  std::lock_guard<std::mutex> lock(mutex_);
  handlers_[tag] = handler;
  for (auto& [queue, waiting] : waiting_) {
    if (waiting.tag != tag || !waiting.server.has_value() ||
        waiting.server->handler == handler) {
      continue;
    }
    stopped.push_back(*std::exchange(waiting.server, std::nullopt));
  }
  return stopped;
}

RequestState::Attached RequestState::Attach(
    int64_t queue, int64_t tag, const Server& server,
    const std::shared_ptr<Operation>& operation) {
  std::shared_ptr<Operation> receives;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (handlers_[tag] != server.handler) return Attached::kStopped;
    Waiting& waiting = waiting_[queue];
    waiting.tag = tag;
    waiting.server = server;
    if (waiting.operation == nullptr) {
      waiting.operation = operation;
      return Attached::kNew;
    }
    receives = waiting.operation;
  }
  receives->Advance();
  return Attached::kWaits;
}

bool RequestState::TakeServer(int64_t queue, std::optional<Server>* server) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (server->has_value()) return true;
  const auto found = waiting_.find(queue);
  if (found == waiting_.end() || !found->second.server.has_value()) {
    return false;
  }
  *server = std::move(found->second.server);
  waiting_.erase(found);
  return true;
}

std::optional<Server> RequestState::Detach(
    int64_t queue, const std::shared_ptr<Operation>& operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto own = own_.find(queue);
  if (own != own_.end() && own->second.operation == operation) {
    own->second.operation = nullptr;
  }
  const auto found = waiting_.find(queue);
  if (found == waiting_.end() || found->second.operation != operation) {
    return std::nullopt;
  }
  std::optional<Server> server = std::move(found->second.server);
  waiting_.erase(found);
  return server;
}

void RequestState::SetClock(int rank, int64_t step) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (step <= clocks_[rank]) return;
    clocks_[rank] = step;
  }
  AdvanceNotified();
}

bool RequestState::AllReached(int64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  return *std::min_element(clocks_.begin(), clocks_.end()) >= step;
}

bool RequestState::TryLock(int64_t queue) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!locked_.has_value()) locked_ = queue;
  return *locked_ == queue;
}

void RequestState::Unlock(int64_t queue) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (locked_ != queue) return;
    locked_.reset();
  }
  AdvanceNotified();
}

void RequestState::Notify(std::shared_ptr<Operation> operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  notified_.push_back(std::move(operation));
}

void RequestState::Ignore(const std::shared_ptr<Operation>& operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  notified_.erase(std::remove(notified_.begin(), notified_.end(), operation),
                  notified_.end());
}

// An operation that waits for the lock takes it here, in the order of Notify.
void RequestState::AdvanceNotified() {
  std::vector<std::shared_ptr<Operation>> operations;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    operations = notified_;
  }
  for (const auto& operation : operations) operation->Advance();
}

}  // namespace tfdist
