// SPDX-License-Identifier: Apache-2.0
//
// InitRows and RoundToWire on a GPU.
#include "custom_ops/codec/wire_functor_gpu.h"
#include "custom_ops/common/allocate_output.h"
#include "custom_ops/gpu/gpu_work.h"
#include "custom_ops/lookup/initial_rows.h"
#include "custom_ops/lookup/initial_rows_gpu.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

absl::Status ReadSeed(OpKernelContext* ctx, int index, uint64_t* seed) {
  const Tensor& input = ctx->input(index);
  if (input.NumElements() != 1) {
    return tensorflow::errors::InvalidArgument(
        "seed must be a scalar. Received shape: ", input.shape().DebugString());
  }
  *seed = *static_cast<const int64_t*>(input.data());
  return absl::OkStatus();
}

class InitRowsGpuOp : public OpKernel {
 public:
  explicit InitRowsGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, rows_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    uint64_t seed = 0;
    OP_REQUIRES_OK(ctx, ReadSeed(ctx, 0, &seed));
    const Block& block = rows_.block();
    Tensor* output = nullptr;
    OP_REQUIRES_OK(
        ctx,
        AllocateOutput(ctx, 0, {block.local_rows, block.local_dim}, &output));
    const GpuWork work(ctx);
    OP_REQUIRES_OK(
        ctx, work.Launched(InitRowsGpu(block, rows_.values(), seed,
                                       static_cast<float*>(output->data()),
                                       work.stream())));
  }

 private:
  InitialRows rows_;
};

class RoundToWireGpuOp : public OpKernel {
 public:
  explicit RoundToWireGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    tensorflow::DataType dtype;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype));
    type_ = dtype == tensorflow::DT_BFLOAT16 ? WireType::kBfloat16
                                             : WireType::kFloat16;
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    uint64_t seed = 0;
    OP_REQUIRES_OK(ctx, ReadSeed(ctx, 1, &seed));
    Tensor* y = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, x.shape(), &y));
    const GpuWork work(ctx);
    OP_REQUIRES_OK(ctx, work.Launched(NarrowAtRandomGpu(
                            type_, static_cast<const float*>(x.data()), seed,
                            x.NumElements(), static_cast<uint16_t*>(y->data()),
                            work.stream())));
  }

 private:
  WireType type_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>InitRows")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("seed"),
                        InitRowsGpuOp);
REGISTER_KERNEL_BUILDER(Name("Tfdist>RoundToWire")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("seed"),
                        RoundToWireGpuOp);

}  // namespace
}  // namespace tfdist
