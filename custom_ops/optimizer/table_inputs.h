// SPDX-License-Identifier: Apache-2.0
//
// Checks of the inputs of SumDuplicateRows and ScaleTable.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_TABLE_INPUTS_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_TABLE_INPUTS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/optimizer/shard_access.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

namespace tf = ::tensorflow;

inline absl::Status CheckRowGradients(const std::string& op,
                                      const tf::Tensor& rows,
                                      const tf::Tensor& grads) {
  if (rows.dims() == 1 && grads.dims() == 2 &&
      grads.dim_size(0) == rows.dim_size(0)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      op, ": expected rows [n] and grads [n, dim]; received ",
      rows.shape().DebugString(), " and ", grads.shape().DebugString()));
}

inline absl::Status ReadScale(tf::OpKernelContext* ctx, const std::string& op,
                              float* factor, Rounding* rounding) {
  const tf::Tensor& input = ctx->input(1);
  if (input.dims() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": factor must be a scalar; received ",
                     input.shape().DebugString()));
  }
  *factor = static_cast<float>(input.scalar<double>()());
  return ReadRounding(ctx, rounding);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_TABLE_INPUTS_H_
