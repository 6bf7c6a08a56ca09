// SPDX-License-Identifier: Apache-2.0
//
// Common part of ResetRows on CPU and GPU. Only the writing of values differs.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_RESET_ROWS_KERNEL_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_RESET_ROWS_KERNEL_H_

#include <vector>

#include "custom_ops/lookup/initial_rows.h"
#include "custom_ops/optimizer/shard_access.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {

// `Where::Reset(ctx, initial, seed, rows, shard)` resets rows of the variable.
// `rows` is in host memory and not empty.
template <typename Where>
class ResetRowsKernel : public tensorflow::OpKernel {
 public:
  explicit ResetRowsKernel(tensorflow::OpKernelConstruction* ctx)
      : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, initial_.Read(ctx));
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tensorflow::Tensor& ids = ctx->input(1);
    if (ids.NumElements() == 0) return;
    ShardAccess shard;
    OP_REQUIRES_OK(ctx, shard.Lock(ctx, 0));
    const Block& block = initial_.block();
    OP_REQUIRES(
        ctx,
        shard.tensor(0).dims() > 0 &&
            shard.tensor(0).dim_size(0) == block.local_rows &&
            shard.tensor(0).NumElements() == block.local_rows * block.local_dim,
        tensorflow::errors::InvalidArgument(
            "variable ", shard.name(0), " must have ", block.local_rows,
            " rows of ", block.local_dim,
            ". Received shape: ", shard.tensor(0).shape().DebugString()));
    const std::vector<ResetRow> rows = OwnRows(ids);
    if (rows.empty()) return;
    const uint64_t seed = ctx->input(2).flat<int64_t>()(0);
    OP_REQUIRES_OK(ctx, Where::Reset(ctx, initial_, seed, rows, &shard));
  }

 private:
  // Returns the rows that are in this cell.
  std::vector<ResetRow> OwnRows(const tensorflow::Tensor& ids) const {
    const Block& block = initial_.block();
    const RotatedMod placement(block.row_parts);
    const auto given = ids.flat<int64_t>();
    std::vector<ResetRow> rows;
    for (int64_t i = 0; i < given.size(); ++i) {
      if (given(i) < 0 || given(i) >= block.rows) continue;
      const int64_t local = placement.LocalRow(given(i));
      const int64_t part = placement.Owner(given(i), local);
      if (part != block.row_part || local >= block.local_rows) continue;
      rows.push_back({given(i), local});
    }
    return rows;
  }

  InitialRows initial_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_RESET_ROWS_KERNEL_H_
