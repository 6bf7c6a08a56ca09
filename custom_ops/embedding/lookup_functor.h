// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_EMBEDDING_LOOKUP_FUNCTOR_H_
#define TFDIST_EMBEDDING_LOOKUP_FUNCTOR_H_

#include <cstdint>

namespace tfdist {

// The pooled lookup, and also its gradient: for every segment s,
//
//   out[s] = sum of weights[i] * table[rows[i]],
//       i in [row_splits[s], row_splits[s + 1])
//
// In the lookup a segment is a sample and `table` the shard; in its gradient a
// segment is a distinct row and `table` the gradient of the samples. No
// TensorFlow here: the same struct drives the CPU and the CUDA functor.
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

}  // namespace tfdist

#endif  // TFDIST_EMBEDDING_LOOKUP_FUNCTOR_H_
