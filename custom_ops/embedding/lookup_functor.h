// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_FUNCTOR_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_FUNCTOR_H_

#include <cstdint>

#include "custom_ops/common/columns.h"

namespace tfdist {

// The pooled lookup: for every segment s,
//
//   out[s] = sum of weights[i] * table[rows[i]],
//       i in [row_splits[s], row_splits[s + 1])
//
// A segment is a sample and `table` the shard; in the gradient of Pool a
// segment is a unique row and `table` the gradient of the samples. No
// TensorFlow here; lookup_functor_gpu.h is the same for a GPU.
struct SegmentSum {
  const float* table;         // [*, width]
  int64_t width;              // columns of table and out
  const int64_t* row_splits;  // [segments + 1]
  const int64_t* rows;        // [entries], within the table
  const float* weights;       // [entries], or nullptr when all are 1
  float* out;                 // [segments, width]
};

// Computes segments [begin, end) on the calling thread.
void SegmentSumCpu(const SegmentSum& args, int64_t begin, int64_t end);

// The same with rows of `table`, which replaces args.table; sums are floats.
void SegmentSumBfloat16Cpu(const SegmentSum& args, const Bfloat16* table,
                           int64_t begin, int64_t end);

// The highest row as an unsigned number: a negative one is above all others. 0
// for no rows.
uint64_t HighestRow(const int64_t* rows, int64_t count);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_FUNCTOR_H_
