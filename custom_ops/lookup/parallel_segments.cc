// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/lookup/parallel_segments.h"

#include <algorithm>

#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/lookup/row_vectors.h"

namespace tfdist {

int64_t SegmentAtWork(const int64_t* row_splits, int64_t segments,
                      int64_t work) {
  int64_t low = 0;
  int64_t high = segments;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (row_splits[middle] - row_splits[0] + middle < work) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

namespace {

// Prefetches the rows of the entries [begin, end).
void PrefetchRows(const SegmentBlock& block, int64_t begin, int64_t end) {
  const SegmentSum& sum = block.args;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t offset = sum.rows[i] * sum.width;
    if (block.bfloat16_table != nullptr) {
      PrefetchRow(block.bfloat16_table + offset, sum.width);
    } else {
      PrefetchRow(sum.table + offset, sum.width);
    }
  }
}

}  // namespace

void ParallelSegmentSums(
    tensorflow::thread::ThreadPool* pool,
    const std::vector<SegmentBlock>& blocks,
    const std::function<bool(size_t block, int64_t first_entry,
                             int64_t end_entry)>& may_read) {
  // The estimate is a nanosecond for four numbers, and a cache miss for some
  // rows.
  constexpr int64_t kNanosecondsPerRow = 10;
  std::vector<Task> tasks;
  for (const SegmentBlock& block : blocks) {
    tasks.push_back({block.Entries() + block.segments,
                     block.args.width / 4 + kNanosecondsPerRow});
  }
  ParallelTasks(pool, tasks, [&](size_t i, int64_t low, int64_t high) {
    const SegmentBlock& block = blocks[i];
    const int64_t* splits = block.args.row_splits;
    const bool last = high == tasks[i].units;
    const int64_t begin =
        low == 0 ? 0 : SegmentAtWork(splits, block.segments, low);
    const int64_t end =
        last ? block.segments : SegmentAtWork(splits, block.segments, high);
    // The first rows of the next block, which the loop over this block's rows
    // does not reach.
    if (last && i + 1 < blocks.size()) {
      const SegmentBlock& next = blocks[i + 1];
      const int64_t first = next.args.row_splits[0];
      const int64_t stop = first + std::min(kPrefetchAhead, next.Entries());
      if (may_read(i + 1, first, stop)) PrefetchRows(next, first, stop);
    }
    if (begin == end || !may_read(i, splits[begin], splits[end])) return;
    if (block.bfloat16_table != nullptr) {
      SegmentSumBfloat16Cpu(block.args, block.bfloat16_table, begin, end);
    } else {
      SegmentSumCpu(block.args, begin, end);
    }
  });
}

}  // namespace tfdist
