// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_FUNCTOR_GPU_H_

#include <cstdint>

namespace tfdist {

// Combiners as in `tf.nn.embedding_lookup_sparse`: kMean divides by the sum of
// the weights, kSqrtn by the square root of the sum of their squares. The
// result is 0 if the divisor is 0.
enum class Combiner { kSum, kMean, kSqrtn };

// Segments that are summed from one table.
struct GpuLookupBlock {
  const void* table;  // [table_rows, width], float or bfloat16
  bool bfloat16;
  int64_t table_rows;
  int64_t width;
  int64_t first_segment;
  float* out;  // [segments of the block, width]
};

// The pooled lookup of lookup_functor.h for all tables. All pointers are device
// memory.
struct GpuLookup {
  // Ascending by first_segment, from 0. No block is empty.
  const GpuLookupBlock* blocks;
  int64_t block_count;
  int64_t widest;  // width of the widest block
  int64_t segments;
  const int64_t* row_splits;  // [segments + 1]
  // [entries]. A kernel cannot raise an error, so it ignores an entry whose row
  // is not in its table.
  const int64_t* rows;
  const float* weights;  // [entries], or nullptr if all are 1
  Combiner combiner;
};

// Launches one kernel on `stream`, a cudaStream_t, and does not wait. Returns a
// cudaError_t.
int LookupGpu(const GpuLookup& args, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_FUNCTOR_GPU_H_
