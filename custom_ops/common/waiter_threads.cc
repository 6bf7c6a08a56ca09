// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/common/waiter_threads.h"

#include <cfenv>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace tfdist {

// Shared with the threads, which are detached. One of them may drop the last
// reference to the owner, and a thread cannot join itself.
struct WaiterThreads::State {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> tasks;
  size_t idle = 0;
  bool stopping = false;
};

WaiterThreads::WaiterThreads() : state_(std::make_shared<State>()) {}

WaiterThreads::~WaiterThreads() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stopping = true;
  state_->wake.notify_all();
}

void WaiterThreads::Schedule(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->idle > state_->tasks.size()) {
      state_->tasks.push_back(std::move(task));
      state_->wake.notify_one();
      return;
    }
  }
  std::thread(&WaiterThreads::Work, state_, std::move(task)).detach();
}

void WaiterThreads::Work(std::shared_ptr<State> state,
                         std::function<void()> first) {
  // A thread inherits the floating-point environment, and TensorFlow's threads
  // flush subnormal numbers to zero. No sum may depend on which thread created
  // this one.
  std::fesetenv(FE_DFL_ENV);
  first();
  first = nullptr;
  std::unique_lock<std::mutex> lock(state->mutex);
  while (true) {
    while (!state->tasks.empty()) {
      std::function<void()> task = std::move(state->tasks.front());
      state->tasks.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // releases what the task holds outside of the lock
      lock.lock();
    }
    if (state->stopping) return;
    ++state->idle;
    state->wake.wait(lock,
                     [&] { return state->stopping || !state->tasks.empty(); });
    --state->idle;
  }
}

}  // namespace tfdist
