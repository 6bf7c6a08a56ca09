// SPDX-License-Identifier: Apache-2.0
//
// Ops that the optimizers need before or after an update: unique rows for
// clipping, and weight decay of an entire table.
#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/optimizer/shard_access.h"
#include "custom_ops/optimizer/sum_duplicates_kernel.h"
#include "custom_ops/optimizer/table_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {
namespace {

namespace tf = ::tensorflow;

class SumDuplicateRowsOp : public SumDuplicatesKernel {
 public:
  using SumDuplicatesKernel::SumDuplicatesKernel;

 protected:
  absl::Status Sum(tf::OpKernelContext* ctx, const UniqueRows& unique,
                   const RowBatch& batch, float* sums) const override {
    const int64_t dim = batch.dim;
    ParallelUnits(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                  unique.size(), 50 + 2 * dim, [&](int64_t begin, int64_t end) {
                    SumRepeated(unique, batch.grads, dim, begin, end,
                                sums + begin * dim);
                  });
    return absl::OkStatus();
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
    OP_REQUIRES_OK(ctx, shard.Lock(ctx, 0));
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
