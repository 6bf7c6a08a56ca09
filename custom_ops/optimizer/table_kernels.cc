// SPDX-License-Identifier: Apache-2.0
//
// What the optimizers need around an update: unique rows for clipping, and
// weight decay of a whole table.
#include <algorithm>

#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/optimizer/row_order.h"
#include "custom_ops/optimizer/shard_access.h"
#include "custom_ops/optimizer/table_inputs.h"
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
    OP_REQUIRES_OK(ctx, CheckRowGradients(name(), rows, grads));
    const auto* data = static_cast<const int64_t*>(rows.data());
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
    float factor = 0;
    Rounding rounding;
    ShardAccess shard;
    OP_REQUIRES_OK(ctx, ReadScale(ctx, name(), &factor, &rounding));
    OP_REQUIRES_OK(ctx, shard.Lock(ctx, 1));
    OP_REQUIRES_OK(ctx, shard.PrepareToWrite(ctx));
    const RowBuffers buffers = shard.Buffers(0, rounding);
    const MatrixSize size = shard.TableSize();
    ParallelUnits(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                  size.rows, size.dim, [&](int64_t begin, int64_t end) {
                    ScaleRows(buffers, size.dim, begin, end, factor);
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
