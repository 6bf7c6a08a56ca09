// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_FUNCTOR_GPU_H_

#include <cstdint>

namespace tfdist {

// As `tf.nn.embedding_lookup_sparse`: a mean is divided by the sum of the
// weights, sqrtn by the root of the sum of their squares; 0 if that is 0.
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

// The pooled lookup of lookup_functor.h for all tables, with all pointers in
// device memory.
struct GpuLookup {
  // Ascending by first_segment, from 0 on. None is empty.
  const GpuLookupBlock* blocks;
  int64_t block_count;
  int64_t widest;  // width of the widest block
  int64_t segments;
  const int64_t* row_splits;  // [segments + 1]
  // [entries]. A kernel raises no error: an entry whose row is not in its table
  // counts as not there.
  const int64_t* rows;
  const float* weights;  // [entries], or nullptr when all are 1
  Combiner combiner;
};

// One launch on `stream`, a cudaStream_t, without waiting. Returns a
// cudaError_t.
int LookupGpu(const GpuLookup& args, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_FUNCTOR_GPU_H_
