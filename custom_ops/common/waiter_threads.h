// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_WAITER_THREADS_H_
#define TFDIST_CUSTOM_OPS_COMMON_WAITER_THREADS_H_

#include <functional>
#include <memory>

namespace tfdist {

// Threads that wait for the network, so that TensorFlow's own threads do not. A
// task gets a thread at once: an idle one, or a new one if all are busy. A
// bounded pool could deadlock two ranks whose pools are full of operations that
// wait for each other.
class WaiterThreads {
 public:
  WaiterThreads();
  // Ends idle threads. Threads that run a task end after it.
  ~WaiterThreads();
  WaiterThreads(const WaiterThreads&) = delete;
  WaiterThreads& operator=(const WaiterThreads&) = delete;

  // Throws std::system_error if no thread can be created; `task` is then not
  // run.
  void Schedule(std::function<void()> task);

 private:
  struct State;
  static void Work(std::shared_ptr<State> state, std::function<void()> first);

  const std::shared_ptr<State> state_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_WAITER_THREADS_H_
