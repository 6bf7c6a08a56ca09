// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_INITIAL_ROWS_GPU_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_INITIAL_ROWS_GPU_H_

#include <cstdint>

#include "custom_ops/embedding/initial_values.h"

namespace tfdist {

// Writes a cell of a table, [local_rows, local_dim] in device memory: what the
// op InitRows draws, padding zero. Launches on `stream`, a cudaStream_t,
// without waiting. Returns a cudaError_t.
int InitRowsGpu(const Block& block, const InitialValues& values, uint64_t seed,
                float* out, void* stream);

// Writes some rows of a cell again, as the op ResetRows does: of a float table,
// or of a bfloat16 one where that is null. Launches as above.
int ResetRowsGpu(const Block& block, const InitialValues& values, uint64_t seed,
                 const ResetRow* rows, int64_t count, float* table,
                 uint16_t* bfloat16_table, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_INITIAL_ROWS_GPU_H_
