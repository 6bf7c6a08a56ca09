// SPDX-License-Identifier: Apache-2.0
//
// Pool and its gradient on a GPU. The numbers are in device memory, the entries
// in host memory.
#include "custom_ops/lookup/pool_kernel.h"
#include "custom_ops/lookup/segment_sum_gpu.h"

namespace tfdist {
namespace {

struct SumsOnGpu {
  static absl::Status Sum(tensorflow::OpKernelContext* ctx,
                          const SegmentSum& sum, int64_t table_rows,
                          int64_t segments) {
    GpuWork work(ctx);
    return SumSegmentsGpu(sum, table_rows, segments, &work);
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Pool")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("row_splits")
                            .HostMemory("positions")
                            .HostMemory("weights"),
                        PoolKernel<SumsOnGpu>);
REGISTER_KERNEL_BUILDER(Name("Tfdist>PoolGrad")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("rows")
                            .HostMemory("row_splits")
                            .HostMemory("positions")
                            .HostMemory("weights"),
                        PoolGradKernel<SumsOnGpu>);

}  // namespace
}  // namespace tfdist
