// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/common/parallel_tasks.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace tfdist {
namespace {

constexpr int64_t kPartsPerThread = 4;
// The minimum that is worth waking a thread.
constexpr int64_t kLeastNanoseconds = 20000;

// The parts of a call. The caller and its helpers take them one by one.
class Parts {
 public:
  // `run` is not called after Finish() has returned.
  Parts(int64_t count, const std::function<void(int64_t part)>& run)
      : count_(count), run_(run) {}

  // Runs parts until no part is left.
  void Help() {
    int64_t mine = 0;
    for (int64_t i; (i = next_.fetch_add(1)) < count_; ++mine) run_(i);
    if (mine == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    done_ += mine;
    if (done_ == count_) all_done_.notify_one();
  }

  // Runs parts and waits for those that helpers are running. Does not wait for
  // helpers that have not started.
  void Finish() {
    Help();
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [this] { return done_ == count_; });
  }

 private:
  const int64_t count_;
  const std::function<void(int64_t)>& run_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
  int64_t done_ = 0;
};

}  // namespace

void ParallelTasks(
    tensorflow::thread::ThreadPool* pool, const std::vector<Task>& tasks,
    const std::function<void(size_t task, int64_t begin, int64_t end)>& work) {
  // Start time of each task, if one thread ran them all.
  std::vector<int64_t> starts = {0};
  for (const Task& task : tasks) {
    starts.push_back(starts.back() + task.units * task.nanoseconds);
  }
  const int64_t total = starts.back();
  const int64_t threads = pool->NumThreads();
  const int64_t parts = threads == 1
                            ? 1
                            : std::clamp<int64_t>(total / kLeastNanoseconds, 1,
                                                  kPartsPerThread * threads);
  // Runs the units that start in [low, high).
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
  const std::function<void(int64_t)> run_part = [&](int64_t part) {
    run(cut(part), cut(part + 1));
  };
  // The caller takes part and completes the work alone if no other thread is
  // free. ParallelFor of the pool would wait for another thread.
  const auto shared = std::make_shared<Parts>(parts, run_part);
  for (int64_t i = 1; i < std::min(threads, parts); ++i) {
    pool->Schedule([shared] { shared->Help(); });
  }
  shared->Finish();
}

void ParallelUnits(
    tensorflow::thread::ThreadPool* pool, int64_t units, int64_t nanoseconds,
    const std::function<void(int64_t begin, int64_t end)>& work) {
  ParallelTasks(pool, {{units, nanoseconds}},
                [&](size_t, int64_t begin, int64_t end) { work(begin, end); });
}

}  // namespace tfdist
