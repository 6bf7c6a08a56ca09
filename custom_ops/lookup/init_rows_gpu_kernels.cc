// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/read_seed.h"
#include "custom_ops/gpu/gpu_work.h"
#include "custom_ops/lookup/initial_rows.h"
#include "custom_ops/lookup/initial_rows_gpu.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

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

REGISTER_KERNEL_BUILDER(Name("Tfdist>InitRows")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("seed"),
                        InitRowsGpuOp);

}  // namespace
}  // namespace tfdist
