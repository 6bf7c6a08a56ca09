// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_PARALLEL_SEGMENTS_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_PARALLEL_SEGMENTS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "custom_ops/lookup/lookup_functor.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tfdist {

// Segments that are summed from one table.
struct SegmentBlock {
  SegmentSum args;
  int64_t segments;
  // If set, read in place of args.table.
  const Bfloat16* bfloat16_table = nullptr;

  int64_t Entries() const {
    return args.row_splits[segments] - args.row_splits[0];
  }
};

// Returns the segment at which to divide segments with the offsets
// `row_splits`: the first one for which the segments and entries before it add
// up to at least `work`.
int64_t SegmentAtWork(const int64_t* row_splits, int64_t segments,
                      int64_t work);

// Computes all blocks on the pool. The work is divided by entries, not by
// segments or blocks, because a frequent row has as many entries as a thousand
// rare ones.
//
// `may_read(block, first_entry, end_entry)` is called before the rows of these
// entries are read. If it returns false, the rows are not read and the sums are
// undefined.
void ParallelSegmentSums(
    tensorflow::thread::ThreadPool* pool,
    const std::vector<SegmentBlock>& blocks,
    const std::function<bool(size_t block, int64_t first_entry,
                             int64_t end_entry)>& may_read);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_PARALLEL_SEGMENTS_H_
