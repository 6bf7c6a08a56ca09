// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_UPDATE_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_UPDATE_FUNCTOR_GPU_H_

#include <cstdint>

#include "custom_ops/optimizer/row_update_functor.h"

namespace tfdist {

// The updates of row_update_functor.h. All pointers are device memory. The
// functions launch on `stream`, a cudaStream_t, do not wait, and return a
// cudaError_t. The rows must be unique. A row outside of [0, num_rows) is
// ignored, and the minimum of its position and *bad_row is stored in bad_row,
// which the caller must initialize.
struct GpuRows {
  RowBatch batch;
  RowBuffers buffers;
  int64_t num_rows;
  uint64_t* bad_row;
};

// Rule: SgdRule, MomentumRule, AdagradRule, RowWiseAdagradRule, AdamRule or
// FtrlRule.
template <typename Rule>
int ApplyRowsGpu(const GpuRows& rows, const Rule& rule, void* stream);

// Clips rows. The batch has no gradients.
int ClipRowsGpu(const GpuRows& rows, const ClipRule& rule, void* stream);

// Updates every row of the table. Rows that are not in the batch have a
// gradient of zero. The rows of the batch must be strictly ascending.
int ApplyAllRowsGpu(const GpuRows& rows, const AdamRule& rule, void* stream);

// Multiplies all rows of the table by a factor.
int ScaleRowsGpu(const RowBuffers& buffers, int64_t num_rows, int64_t dim,
                 float factor, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_UPDATE_FUNCTOR_GPU_H_
