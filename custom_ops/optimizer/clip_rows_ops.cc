// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/optimizer/clip_inputs.h"
#include "custom_ops/optimizer/shard_access.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {
namespace {

namespace tf = ::tensorflow;

REGISTER_OP("Tfdist>ClipRows")
    .Input("table: resource")
    .Input("rows: int64")
    .Input("squares: float")
    .Input("max_norm: double")
    .Input("rounding_seeds: num_seeds * int64")
    .Attr("num_seeds: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::NoOutputs)
    .Doc(
        "Scales rows of a table whose norm is larger than max_norm down to "
        "this norm, in place. rows [n] must be unique. If this rank has only "
        "some of the columns, squares [n] are the sums of squares of the whole "
        "rows; otherwise squares [0]. Rows with NaN are not changed.");

class ClipRowsOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tf::OpKernelContext* ctx) override {
    ClipInputs inputs;
    ShardAccess shard;
    OP_REQUIRES_OK(ctx, shard.Lock(ctx, 0));
    OP_REQUIRES_OK(ctx, inputs.Read(ctx, name(), shard));
    OP_REQUIRES_OK(ctx, shard.PrepareToWriteRows(ctx));
    shard.WillWrite(inputs.batch.rows, inputs.batch.size);
    const RowBuffers buffers = shard.Buffers(0, inputs.rounding);
    ParallelUnits(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                  inputs.batch.size, 50 + inputs.batch.dim,
                  [&](int64_t begin, int64_t end) {
                    inputs.rule.Apply(inputs.batch, buffers, begin, end);
                  });
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>ClipRows").Device(tf::DEVICE_CPU),
                        ClipRowsOp);

}  // namespace
}  // namespace tfdist
