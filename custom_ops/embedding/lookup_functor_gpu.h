// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_EMBEDDING_LOOKUP_FUNCTOR_GPU_H_
#define TFDIST_EMBEDDING_LOOKUP_FUNCTOR_GPU_H_

#include <cstdint>

#include "lookup_functor.h"

// Launched on `stream` (a cudaStream_t), without waiting. All pointers are
// device memory. Returns a cudaError_t, 0 for success. Entries outside of the
// table's `table_rows` rows count as zero: a kernel cannot raise an error.
extern "C" {

// Computes segments [0, segments) of `args`.
int TfdistSegmentSumGpu(const tfdist::SegmentSum* args, int64_t table_rows,
                        int64_t segments, void* stream);

// The gradient and SGD in one pass, no gradient in memory: for every segment s
//   target[unique_rows[s]] -= learning_rate * (segment s of args)
// `args->table` is the gradient of the samples, `args->out` is not used;
// unique_rows are distinct and below target_rows.
int TfdistSegmentApplySgdGpu(const tfdist::SegmentSum* args, int64_t table_rows,
                             int64_t segments, const int64_t* unique_rows,
                             float* target, int64_t target_rows,
                             float learning_rate, void* stream);

}  // extern "C"

#endif  // TFDIST_EMBEDDING_LOOKUP_FUNCTOR_GPU_H_
