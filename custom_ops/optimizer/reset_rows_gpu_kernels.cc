// SPDX-License-Identifier: Apache-2.0
//
// ResetRows on a GPU. The variable is in device memory, the rows are in host
// memory.
#include "custom_ops/lookup/initial_rows_gpu.h"
#include "custom_ops/optimizer/gpu_shard.h"
#include "custom_ops/optimizer/reset_rows_kernel.h"

namespace tfdist {
namespace {

struct ResetOnGpu {
  static absl::Status Reset(tensorflow::OpKernelContext* ctx,
                            const InitialRows& initial, uint64_t seed,
                            const std::vector<ResetRow>& rows,
                            ShardAccess* shard) {
    GpuWork work(ctx);
    TF_RETURN_IF_ERROR(PrepareToWrite(ctx, work, shard));
    const ResetRow* there = nullptr;
    TF_RETURN_IF_ERROR(UploadRows(rows.data(), rows.size(), &work, &there));
    const RowBuffers buffers = shard->Buffers(0, {});
    return work.Launched(ResetRowsGpu(initial.block(), initial.values(), seed,
                                      there, rows.size(), buffers.table,
                                      buffers.bfloat16_table, work.stream()));
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>ResetRows")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("variable")
                            .HostMemory("ids")
                            .HostMemory("seed"),
                        ResetRowsKernel<ResetOnGpu>);

}  // namespace
}  // namespace tfdist
