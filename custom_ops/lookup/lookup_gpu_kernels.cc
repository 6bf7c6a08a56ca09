// SPDX-License-Identifier: Apache-2.0
//
// Lookup on a GPU. Tables, ids and results are in device memory.
#include <algorithm>
#include <vector>

#include "custom_ops/gpu/gpu_work.h"
#include "custom_ops/lookup/lookup_functor_gpu.h"
#include "custom_ops/lookup/lookup_kernel.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class LookupGpuOp : public LookupKernel {
 public:
  using LookupKernel::LookupKernel;

 protected:
  absl::Status CheckIds(const LookupInputs& inputs,
                        int64_t samples) const override {
    return CheckIdListShapes(0, inputs.rows, inputs.row_splits, inputs.weights,
                             samples);
  }

  absl::Status Sum(OpKernelContext* ctx, const ReadTables& tables,
                   const LookupInputs& inputs, const LookupBlocks& found,
                   float* values) const override {
    if (found.blocks.empty()) return absl::OkStatus();
    std::vector<GpuLookupBlock> blocks;
    int64_t widest = 0;
    for (const LookupBlock& block : found.blocks) {
      const Tensor& table = tables[block.table];
      blocks.push_back({table.data(), table.dtype() != tensorflow::DT_FLOAT,
                        table.dim_size(0), block.width, block.first_sample,
                        values + block.first_value});
      widest = std::max(widest, block.width);
    }
    GpuWork work(ctx);
    Upload upload(&work);
    const size_t blocks_at = upload.Add(blocks);
    TF_RETURN_IF_ERROR(upload.Start());
    const GpuLookup args = {
        upload.At<GpuLookupBlock>(blocks_at),
        static_cast<int64_t>(blocks.size()),
        widest,
        inputs.row_splits.NumElements() - 1,
        static_cast<const int64_t*>(inputs.row_splits.data()),
        static_cast<const int64_t*>(inputs.rows.data()),
        WeightsOrNull(inputs.weights),
        Combiner::kSum};
    return work.Launched(LookupGpu(args, work.stream()));
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Lookup")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("tables")
                            .HostMemory("served")
                            .HostMemory("send_splits"),
                        LookupGpuOp);

}  // namespace
}  // namespace tfdist
