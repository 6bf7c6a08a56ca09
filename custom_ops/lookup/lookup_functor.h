// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_FUNCTOR_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_FUNCTOR_H_

#include <cstdint>

#include "custom_ops/common/columns.h"

namespace tfdist {

// The pooled lookup: for each segment s,
//
//   out[s] = sum of weights[i] * table[rows[i]],
//       i in [row_splits[s], row_splits[s + 1])
//
// In a lookup, a segment is a sample and `table` is the shard. In the gradient
// of Pool, a segment is a unique row and `table` is the gradient of the
// samples. This file does not use TensorFlow. lookup_functor_gpu.h is the
// version for a GPU.
struct SegmentSum {
  const float* table;         // [*, width]
  int64_t width;              // columns of table and out
  const int64_t* row_splits;  // [segments + 1]
  const int64_t* rows;        // [entries], each within the table
  const float* weights;       // [entries], or nullptr if all are 1
  float* out;                 // [segments, width]
};

// Computes segments [begin, end) on the calling thread.
void SegmentSumCpu(const SegmentSum& args, int64_t begin, int64_t end);

// Like SegmentSumCpu, with a bfloat16 `table` in place of args.table. Sums are
// float.
void SegmentSumBfloat16Cpu(const SegmentSum& args, const Bfloat16* table,
                           int64_t begin, int64_t end);

// Returns the highest row as an unsigned number, so that a negative row is
// above all others. Returns 0 for no rows.
uint64_t HighestRow(const int64_t* rows, int64_t count);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_FUNCTOR_H_
