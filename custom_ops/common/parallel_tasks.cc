// SPDX-License-Identifier: Apache-2.0
#include "common/parallel_tasks.h"

#include <algorithm>

namespace tfdist {
namespace {

constexpr int64_t kPartsPerThread = 4;
constexpr int64_t kLeastNanoseconds = 20000;  // worth waking up a thread

}  // namespace

void ParallelTasks(
    tensorflow::thread::ThreadPool* pool, const std::vector<Task>& tasks,
    const std::function<void(size_t task, int64_t begin, int64_t end)>& work) {
  std::vector<int64_t> starts = {0};  // of every task, were it one thread
  for (const Task& task : tasks) {
    starts.push_back(starts.back() + task.units * task.nanoseconds);
  }
  const int64_t total = starts.back();
  const int64_t parts =
      std::max<int64_t>(1, std::min(kPartsPerThread * pool->NumThreads(),
                                    total / kLeastNanoseconds));
  // The units that start in [low, high).
  const auto run = [&](int64_t low, int64_t high) {
    size_t task = std::upper_bound(starts.begin(), starts.end(), low) -
                  starts.begin() - 1;
    for (; task < tasks.size() && starts[task] < high; ++task) {
      const int64_t each = tasks[task].nanoseconds;
      const auto unit = [&](int64_t time) {
        return std::clamp<int64_t>((time - starts[task] + each - 1) / each, 0,
                                   tasks[task].units);
      };
      const int64_t begin = low > starts[task] ? unit(low) : 0;
      const int64_t end = unit(high);
      if (begin < end) work(task, begin, end);
    }
  };
  if (parts == 1) {
    run(0, total);
    return;
  }
  const auto cut = [&](int64_t part) {
    return total / parts * part + total % parts * part / parts;
  };
  pool->ParallelFor(parts, total / parts, [&](int64_t first, int64_t last) {
    run(cut(first), cut(last));
  });
}

}  // namespace tfdist
