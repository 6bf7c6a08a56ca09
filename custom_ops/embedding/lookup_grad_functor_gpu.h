// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_GRAD_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_GRAD_FUNCTOR_GPU_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// The gradient of the pooled lookup: every row of the table that the entries
// name, once and ascending, and the sum of weight * gradient of the sample over
// its entries. All pointers are device memory.
struct GpuRowGrads {
  const float* grad;  // [samples, width]
  int64_t width;
  int64_t samples;
  const int64_t* row_splits;  // [samples + 1]; nullptr: sample s has entry s
  const int64_t* rows;        // [entries]; one outside of the table is left out
  const float* weights;       // [entries], or nullptr when all are 1
  int64_t entries;            // at most 2^31 - 1: their positions are sorted
  int64_t table_rows;
  int64_t* unique_rows;  // room for [entries]
  float* row_grads;      // room for [entries, width]
  int64_t* unique;       // how many of them there are
};

// Device memory that RowGradsGpu needs besides.
size_t RowGradsScratchBytes(const GpuRowGrads& args);

// Launches on `stream`, a cudaStream_t, without waiting. Returns a cudaError_t.
//
// Entries are sorted by row and cut into chunks of as many, so that a frequent
// row is the work of many threads. A row within a chunk is finished there; of
// one that goes on, every chunk has a partial sum, and these are added in their
// order. The order depends on nothing else: the same bits always.
int RowGradsGpu(const GpuRowGrads& args, void* scratch, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_GRAD_FUNCTOR_GPU_H_
