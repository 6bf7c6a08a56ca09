// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_WAITER_THREADS_H_
#define TFDIST_CUSTOM_OPS_COMMON_WAITER_THREADS_H_

#include <functional>
#include <memory>

namespace tfdist {

// Threads that spend their life waiting for the network, so that TensorFlow's
// own threads never do. A task always gets a thread at once: an idle one, or
// a new one when all are waiting. A bounded pool could deadlock two ranks
// whose pools are filled with operations that wait for each other.
class WaiterThreads {
 public:
  WaiterThreads();
  // Lets idle threads go. Threads still in a task finish it and go then.
  ~WaiterThreads();
  WaiterThreads(const WaiterThreads&) = delete;
  WaiterThreads& operator=(const WaiterThreads&) = delete;

  // Throws std::system_error where no thread can be made; `task` is not run.
  void Schedule(std::function<void()> task);

 private:
  struct State;
  static void Work(std::shared_ptr<State> state, std::function<void()> first);

  const std::shared_ptr<State> state_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_WAITER_THREADS_H_
