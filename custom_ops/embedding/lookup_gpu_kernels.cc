// SPDX-License-Identifier: Apache-2.0
//
// Lookup on a GPU: the tables and the results are there, ids on the host.
#include <algorithm>
#include <vector>

#include "custom_ops/common/gpu_work.h"
#include "custom_ops/embedding/lookup_functor_gpu.h"
#include "custom_ops/embedding/lookup_kernel.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Whether sample s has entry s alone.
bool IsSingle(const int64_t* row_splits, int64_t samples) {
  for (int64_t s = 0; s <= samples; ++s) {
    if (row_splits[s] != s) return false;
  }
  return true;
}

class LookupGpuOp : public LookupKernel {
 public:
  using LookupKernel::LookupKernel;

 protected:
  absl::Status Sum(OpKernelContext* ctx, const ReadTables& tables,
                   const LookupInputs& inputs, const LookupBlocks& found,
                   float* values) const override {
    const auto* splits = static_cast<const int64_t*>(inputs.row_splits.data());
    const auto* rows = static_cast<const int64_t*>(inputs.rows.data());
    if (found.blocks.empty()) return absl::OkStatus();
    std::vector<GpuLookupBlock> blocks;
    int64_t widest = 0;
    for (const LookupBlock& block : found.blocks) {
      const Tensor& table = tables[block.table];
      TF_RETURN_IF_ERROR(CheckRows(
          block.table, table.dim_size(0), rows + splits[block.first_sample],
          rows + splits[block.first_sample + block.samples]));
      blocks.push_back({table.data(), table.dtype() != tensorflow::DT_FLOAT,
                        table.dim_size(0), block.width, block.first_sample,
                        values + block.first_value});
      widest = std::max(widest, block.width);
    }
    const Tensor& weights = inputs.weights;
    const int64_t samples = inputs.row_splits.NumElements() - 1;
    const bool single = IsSingle(splits, samples);

    GpuWork work(ctx);
    Upload upload(&work);
    const size_t blocks_at = upload.Add(blocks);
    const size_t splits_at = upload.Add(splits, single ? 0 : samples + 1);
    const size_t rows_at = upload.Add(rows, inputs.rows.NumElements());
    const size_t weights_at = upload.Add(
        static_cast<const float*>(weights.data()), weights.NumElements());
    TF_RETURN_IF_ERROR(upload.Start());
    const GpuLookup args = {
        upload.At<GpuLookupBlock>(blocks_at),
        static_cast<int64_t>(blocks.size()),
        widest,
        samples,
        single ? nullptr : upload.At<int64_t>(splits_at),
        upload.At<int64_t>(rows_at),
        weights.NumElements() == 0 ? nullptr : upload.At<float>(weights_at),
        Combiner::kSum,
        nullptr};  // no row is outside of its table
    return work.Launched(LookupGpu(args, work.stream()));
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Lookup")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("tables")
                            .HostMemory("row_splits")
                            .HostMemory("rows")
                            .HostMemory("weights")
                            .HostMemory("served")
                            .HostMemory("send_splits"),
                        LookupGpuOp);

}  // namespace
}  // namespace tfdist
