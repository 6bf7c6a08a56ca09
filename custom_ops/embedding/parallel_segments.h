// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_EMBEDDING_PARALLEL_SEGMENTS_H_
#define TFDIST_EMBEDDING_PARALLEL_SEGMENTS_H_

#include <algorithm>
#include <cstdint>

#include "lookup_functor.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tfdist {

// The first segment whose segments and entries before it make up at least
// `work`.
inline int64_t SegmentAtWork(const int64_t* row_splits, int64_t segments,
                             int64_t work) {
  int64_t low = 0;
  int64_t high = segments;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (row_splits[middle] + middle < work) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Computes all segments on the pool. The work is cut by entries, not by
// segments: a frequent row has as many entries as a thousand rare ones.
inline void ParallelSegmentSum(tensorflow::thread::ThreadPool* pool,
                               const SegmentSum& args, int64_t segments) {
  constexpr int64_t kPartsPerThread = 4;
  constexpr int64_t kLeastWork = 1024;
  const int64_t work = args.row_splits[segments] + segments;
  const int64_t parts = std::max<int64_t>(
      1, std::min(kPartsPerThread * pool->NumThreads(), work / kLeastWork));
  // About a nanosecond for four floats, and one trip to memory for a row.
  const int64_t cost = (work / parts + 1) * (args.width / 4 + 20);
  pool->ParallelFor(parts, cost, [&](int64_t first, int64_t last) {
    const int64_t begin =
        SegmentAtWork(args.row_splits, segments, work * first / parts);
    const int64_t end = last == parts ? segments
                                      : SegmentAtWork(args.row_splits, segments,
                                                      work * last / parts);
    SegmentSumCpu(args, begin, end);
  });
}

}  // namespace tfdist

#endif  // TFDIST_EMBEDDING_PARALLEL_SEGMENTS_H_
