// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_UPDATE_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_UPDATE_FUNCTOR_GPU_H_

#include <cstdint>

#include "custom_ops/optimizer/row_update_functor.h"

namespace tfdist {

// The updates of row_update_functor.h with all pointers in device memory. They
// launch on `stream`, a cudaStream_t, without waiting, and return a
// cudaError_t. Rows are unique; one outside of [0, num_rows) is left out and
// min(its position) written to bad_row, which the caller fills before.
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

// No gradients.
int ClipRowsGpu(const GpuRows& rows, const ClipRule& rule, void* stream);

// Every row of the table; those of the batch, which ascend strictly, with their
// gradient and the others with one of zero.
int ApplyAllRowsGpu(const GpuRows& rows, const AdamRule& rule, void* stream);

// Multiplies all rows of the table by a factor.
int ScaleRowsGpu(const RowBuffers& buffers, int64_t num_rows, int64_t dim,
                 float factor, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_UPDATE_FUNCTOR_GPU_H_
