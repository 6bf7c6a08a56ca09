// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_INITIAL_ROWS_GPU_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_INITIAL_ROWS_GPU_H_

#include <cstdint>

#include "custom_ops/lookup/initial_values.h"

namespace tfdist {

// Computes a cell of a table, [local_rows, local_dim] in device memory, as the
// op InitRows does, with zeros for padding. Launches on `stream`, a
// cudaStream_t, and does not wait. Returns a cudaError_t.
int InitRowsGpu(const Block& block, const InitialValues& values, uint64_t seed,
                float* out, void* stream);

// Resets some rows of a cell to their initial values, as the op ResetRows does.
// Writes to `table`, or to `bfloat16_table` if `table` is null. Launches like
// InitRowsGpu.
int ResetRowsGpu(const Block& block, const InitialValues& values, uint64_t seed,
                 const ResetRow* rows, int64_t count, float* table,
                 uint16_t* bfloat16_table, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_INITIAL_ROWS_GPU_H_
