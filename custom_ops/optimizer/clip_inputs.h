// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_CLIP_INPUTS_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_CLIP_INPUTS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/optimizer/row_order.h"
#include "custom_ops/optimizer/row_update_functor.h"
#include "custom_ops/optimizer/rule_inputs.h"
#include "custom_ops/optimizer/shard_access.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// The checked inputs of ClipRows: the rows are within the table and unique.
struct ClipInputs {
  ClipRule rule;
  RowBatch batch;
  Rounding rounding;

  absl::Status Read(tf::OpKernelContext* ctx, const std::string& op,
                    const ShardAccess& shard) {
    const tf::Tensor& rows = ctx->input(1);
    const tf::Tensor& squares = ctx->input(2);
    const tf::TensorShape& table = shard.tensor(0).shape();
    TF_RETURN_IF_ERROR(Scalar(ctx, "max_norm", &rule.longest));
    TF_RETURN_IF_ERROR(ReadRounding(ctx, &rounding));
    const int64_t size = rows.NumElements();
    if (table.dims() != 2 || rows.dims() != 1 || squares.dims() != 1 ||
        (squares.dim_size(0) != 0 && squares.dim_size(0) != size)) {
      return absl::InvalidArgumentError(absl::StrCat(
          op,
          ": rows [n] and squares [n] or [0] must fit the table [rows, dim]; "
          "received rows ",
          rows.shape().DebugString(), ", squares ",
          squares.shape().DebugString(), ", table ", table.DebugString(), " (",
          shard.name(0), ")"));
    }
    rule.squares = squares.dim_size(0) == 0
                       ? nullptr
                       : static_cast<const float*>(squares.data());
    batch = {static_cast<const int64_t*>(rows.data()), nullptr, size,
             table.dim_size(1)};
    TF_RETURN_IF_ERROR(CheckRowsInside(op, batch.rows, size, table.dim_size(0),
                                       shard.name(0)));
    return CheckEachOnce(op, batch.rows, size);
  }
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_CLIP_INPUTS_H_
