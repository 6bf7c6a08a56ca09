// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_SUM_DUPLICATES_KERNEL_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_SUM_DUPLICATES_KERNEL_H_

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "custom_ops/optimizer/row_order.h"
#include "custom_ops/optimizer/row_update_functor.h"
#include "custom_ops/optimizer/table_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// SumDuplicateRows without the sums, which differ between CPU and GPU. The rows
// are in host memory.
class SumDuplicatesKernel : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tf::OpKernelContext* ctx) final {
    const tf::Tensor& rows = ctx->input(0);
    const tf::Tensor& grads = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckRowGradients(name(), rows, grads));
    const auto* data = static_cast<const int64_t*>(rows.data());
    if (StrictlyAscending(data, rows.NumElements())) {
      ctx->set_output(0, rows);
      ctx->set_output(1, grads);
      return;
    }
    OP_REQUIRES_OK(ctx, CheckSortable(name(), rows.NumElements()));
    const UniqueRows unique(data, rows.NumElements());
    const int64_t dim = grads.dim_size(1);
    tf::Tensor* unique_rows;
    tf::Tensor* sums;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {unique.size()}, &unique_rows));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, {unique.size(), dim}, &sums));
    std::copy_n(unique.rows(), unique.size(),
                static_cast<int64_t*>(unique_rows->data()));
    const RowBatch batch = {data, static_cast<const float*>(grads.data()),
                            rows.NumElements(), dim};
    OP_REQUIRES_OK(ctx,
                   Sum(ctx, unique, batch, static_cast<float*>(sums->data())));
  }

 protected:
  // Computes sums[k], the sum of the gradients of unique row k in the order of
  // the batch.
  virtual absl::Status Sum(tf::OpKernelContext* ctx, const UniqueRows& unique,
                           const RowBatch& batch, float* sums) const = 0;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_SUM_DUPLICATES_KERNEL_H_
