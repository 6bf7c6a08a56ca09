// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_FUNCTOR_GPU_H_

#include <cstdint>

#include "custom_ops/embedding/lookup_functor.h"

// Launched on `stream` (a cudaStream_t), without waiting. All pointers are
// device memory. Returns a cudaError_t, 0 for success. Entries outside of the
// table's `table_rows` rows count as zero: a kernel cannot raise an error.
extern "C" {

// Computes segments [0, segments) of `args`.
int TfdistSegmentSumGpu(const tfdist::SegmentSum* args, int64_t table_rows,
                        int64_t segments, void* stream);

}  // extern "C"

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_FUNCTOR_GPU_H_
