// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_PARALLEL_TASKS_H_
#define TFDIST_CUSTOM_OPS_COMMON_PARALLEL_TASKS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "tensorflow/core/lib/core/threadpool.h"

namespace tfdist {

// A piece of work that can be divided between any of its units.
struct Task {
  int64_t units;
  int64_t nanoseconds;  // approximate time of a unit; at least 1
};

// Calls work(task, begin, end) for all units of all tasks, each unit once. The
// work is divided by time: a long task is spread over threads, many short tasks
// share one, and work for a single thread runs on the caller's thread. A task
// that cannot be divided must do all its work in the call with begin == 0.
void ParallelTasks(
    tensorflow::thread::ThreadPool* pool, const std::vector<Task>& tasks,
    const std::function<void(size_t task, int64_t begin, int64_t end)>& work);

// Like ParallelTasks, for a single task.
void ParallelUnits(tensorflow::thread::ThreadPool* pool, int64_t units,
                   int64_t nanoseconds,
                   const std::function<void(int64_t begin, int64_t end)>& work);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_PARALLEL_TASKS_H_
