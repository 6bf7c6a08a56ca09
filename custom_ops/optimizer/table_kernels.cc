// SPDX-License-Identifier: Apache-2.0
//
// What the optimizers need around an update: unique rows for clipping, and
// weight decay of a whole table.
#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/optimizer/row_order.h"
#include "custom_ops/optimizer/row_update_functor.h"
#include "custom_ops/optimizer/shard_access.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {
namespace {

namespace tf = ::tensorflow;

class SumDuplicateRowsOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tf::OpKernelContext* ctx) override {
    const tf::Tensor& rows = ctx->input(0);
    const tf::Tensor& grads = ctx->input(1);
    OP_REQUIRES(
        ctx,
        rows.dims() == 1 && grads.dims() == 2 &&
            grads.dim_size(0) == rows.dim_size(0),
        absl::InvalidArgumentError(absl::StrCat(
            name(), ": expected rows [n] and grads [n, dim]; received ",
            rows.shape().DebugString(), " and ", grads.shape().DebugString())));
    const int64_t* data = rows.flat<int64_t>().data();
    if (StrictlyAscending(data, rows.NumElements())) {
      ctx->set_output(0, rows);
      ctx->set_output(1, grads);
      return;
    }
    OP_REQUIRES_OK(ctx, CheckSortable(name(), rows.NumElements()));
    SumUnique(ctx, UniqueRows(data, rows.NumElements()), grads);
  }

 private:
  static void SumUnique(tf::OpKernelContext* ctx, const UniqueRows& unique,
                        const tf::Tensor& grads) {
    const int64_t dim = grads.dim_size(1);
    tf::Tensor* rows;
    tf::Tensor* sums;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {unique.size()}, &rows));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, {unique.size(), dim}, &sums));
    std::copy_n(unique.rows(), unique.size(), rows->flat<int64_t>().data());
    float* data = sums->flat<float>().data();
    ParallelUnits(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                  unique.size(), 50 + 2 * dim, [&](int64_t begin, int64_t end) {
                    SumRepeated(unique, grads.flat<float>().data(), dim, begin,
                                end, data + begin * dim);
                  });
  }
};

class ScaleTableOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tf::OpKernelContext* ctx) override {
    const tf::Tensor& factor = ctx->input(1);
    OP_REQUIRES(ctx, factor.dims() == 0,
                absl::InvalidArgumentError(
                    absl::StrCat(name(), ": factor must be a scalar; received ",
                                 factor.shape().DebugString())));
    Rounding rounding;
    OP_REQUIRES_OK(ctx, ReadRounding(ctx, &rounding));
    ShardAccess shard;
    OP_REQUIRES_OK(ctx, shard.Lock(ctx, 1));
    OP_REQUIRES_OK(ctx, shard.PrepareToWrite(ctx));
    const RowBuffers buffers = shard.Buffers(0, rounding);
    const int64_t size = shard.tensor(0).NumElements();
    const int64_t rows =
        shard.tensor(0).dims() == 0 ? 1 : shard.tensor(0).dim_size(0);
    if (size == 0) return;
    const auto scale = static_cast<float>(factor.scalar<double>()());
    ParallelUnits(ctx->device()->tensorflow_cpu_worker_threads()->workers, rows,
                  size / rows, [&](int64_t begin, int64_t end) {
                    ScaleRows(buffers, size / rows, begin, end, scale);
                  });
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>SumDuplicateRows")
                            .Device(tf::DEVICE_CPU)
                            .TypeConstraint<float>("T"),
                        SumDuplicateRowsOp);

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>ScaleTable").Device(tf::DEVICE_CPU).TypeConstraint<float>("T"),
    ScaleTableOp);

}  // namespace
}  // namespace tfdist
