// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/codec/wire_functor_gpu.h"
#include "custom_ops/common/read_seed.h"
#include "custom_ops/gpu/gpu_work.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

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

REGISTER_KERNEL_BUILDER(Name("Tfdist>RoundToWire")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("seed"),
                        RoundToWireGpuOp);

}  // namespace
}  // namespace tfdist
