// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/lookup/entry_sorter.h"

#include <algorithm>

#include "custom_ops/common/parallel_tasks.h"

namespace tfdist {
namespace {

constexpr int64_t kEntriesPerRange = 16384;

// Returns bound i of `size` equal ranges of [0, limit), without overflow.
int64_t Cut(int64_t limit, int64_t i, int64_t size) {
  return limit / size * i + limit % size * i / size;
}

// Divides the rows of a table into ranges that are large enough for a thread.
// Each range costs a search of all entries of its table, so there are no more
// ranges of all tables, with `total` entries, than threads need.
int64_t CountRanges(const TableEntries& table, int64_t total, int threads) {
  if (table.count == 0) return 0;
  const int64_t needed = (table.count * threads + total - 1) / total;
  return std::clamp<int64_t>(table.count / kEntriesPerRange, 1, needed);
}

}  // namespace

absl::Status EntrySorter::Run(tensorflow::OpKernelContext* ctx,
                              const std::vector<TableEntries>& tables,
                              const Use& use) {
  std::vector<int64_t> limits(tables.size());
  for (size_t t = 0; t < tables.size(); ++t) {
    TF_RETURN_IF_ERROR(RowLimit(tables[t], &limits[t]));
  }
  // Taken by this call, because another call may run at the same time.
  Scratch scratch;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    scratch.swap(scratch_);
  }
  auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
  const int64_t at_once = kEntriesPerRange * std::max(4, pool->NumThreads());
  for (size_t first = 0; first < tables.size();) {
    size_t end = first;
    for (int64_t entries = 0; end < tables.size() && entries < at_once;) {
      entries += tables[end++].count;
    }
    TF_RETURN_IF_ERROR(Sort(ctx, tables, limits, first, end, use, &scratch));
    first = end;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  scratch_.swap(scratch);
  return absl::OkStatus();
}

absl::Status EntrySorter::Sort(tensorflow::OpKernelContext* ctx,
                               const std::vector<TableEntries>& tables,
                               const std::vector<int64_t>& limits, size_t first,
                               size_t end, const Use& use, Scratch* scratch) {
  constexpr int64_t kNanosecondsPerEntry = 8;
  auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
  std::vector<SortedRange> ranges;
  std::vector<Task> tasks;
  int64_t total = 0;
  for (size_t t = first; t < end; ++t) total += tables[t].count;
  for (size_t t = first; t < end; ++t) {
    const int64_t size = CountRanges(tables[t], total, pool->NumThreads());
    for (int64_t i = 0; i < size; ++i) {
      if (scratch->size() == ranges.size()) {
        scratch->push_back(std::make_unique<SortedEntries>());
      }
      ranges.push_back({t, Cut(limits[t], i, size), Cut(limits[t], i + 1, size),
                        (*scratch)[ranges.size()].get()});
      tasks.push_back({tables[t].count / size + 1, kNanosecondsPerEntry});
    }
  }
  ParallelTasks(pool, tasks, [&](size_t i, int64_t begin, int64_t) {
    if (begin > 0) return;
    const SortedRange& range = ranges[i];
    const bool all = range.low == 0 && range.high == limits[range.table];
    (*scratch)[i]->Build(tables[range.table], range.low, range.high, all);
  });
  return use(first, end, ranges);
}

}  // namespace tfdist
