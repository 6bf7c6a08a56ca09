// SPDX-License-Identifier: Apache-2.0
//
// Lookup on a GPU: the tables and the results are there, ids on the host.
#include <algorithm>
#include <vector>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/gpu_work.h"
#include "custom_ops/embedding/id_lists.h"
#include "custom_ops/embedding/lookup_blocks.h"
#include "custom_ops/embedding/lookup_functor_gpu.h"
#include "custom_ops/embedding/read_tables.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Whether sample s has entry s alone.
bool IsSingle(const int64_t* row_splits, int64_t samples) {
  for (int64_t s = 0; s <= samples; ++s) {
    if (row_splits[s] != s) return false;
  }
  return true;
}

class LookupGpuOp : public tensorflow::OpKernel {
 public:
  explicit LookupGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &count_));
    OP_REQUIRES_OK(ctx, ReadFeatureTables(ctx, count_, &feature_tables_));
  }

  void Compute(OpKernelContext* ctx) override {
    ReadTables tables;
    OP_REQUIRES_OK(ctx, tables.Lock(ctx, count_));
    LookupBlocks found;
    OP_REQUIRES_OK(ctx, Check(ctx, tables, &found));
    Tensor* values = nullptr;
    Tensor* send_splits = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {found.values}, &values));
    const int64_t ranks = found.send_splits.size();
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {ranks}, &send_splits));
    std::copy(found.send_splits.begin(), found.send_splits.end(),
              send_splits->vec<int64_t>().data());
    OP_REQUIRES_OK(
        ctx, Launch(ctx, tables, found, static_cast<float*>(values->data())));
  }

 private:
  absl::Status Check(OpKernelContext* ctx, const ReadTables& tables,
                     LookupBlocks* found) const {
    const Tensor& row_splits = ctx->input(count_);
    const int64_t samples = row_splits.NumElements() - 1;
    TF_RETURN_IF_ERROR(CheckIdList(0, ctx->input(count_ + 1), row_splits,
                                   ctx->input(count_ + 2), samples));
    TF_RETURN_IF_ERROR(FindLookupBlocks(samples, ctx->input(count_ + 3),
                                        feature_tables_, tables.Widths(),
                                        found));
    const auto* splits = static_cast<const int64_t*>(row_splits.data());
    const auto* rows =
        static_cast<const int64_t*>(ctx->input(count_ + 1).data());
    for (const LookupBlock& block : found->blocks) {
      TF_RETURN_IF_ERROR(
          CheckRows(block.table, tables[block.table].dim_size(0),
                    rows + splits[block.first_sample],
                    rows + splits[block.first_sample + block.samples]));
    }
    return absl::OkStatus();
  }

  absl::Status Launch(OpKernelContext* ctx, const ReadTables& tables,
                      const LookupBlocks& found, float* values) const {
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
    const Tensor& row_splits = ctx->input(count_);
    const Tensor& rows = ctx->input(count_ + 1);
    const Tensor& weights = ctx->input(count_ + 2);
    const auto* splits = static_cast<const int64_t*>(row_splits.data());
    const int64_t samples = row_splits.NumElements() - 1;
    const bool single = IsSingle(splits, samples);

    GpuWork work(ctx);
    Upload upload(&work);
    const size_t blocks_at = upload.Add(blocks);
    const size_t splits_at = upload.Add(splits, single ? 0 : samples + 1);
    const size_t rows_at = upload.Add(static_cast<const int64_t*>(rows.data()),
                                      rows.NumElements());
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

  int count_ = 0;
  std::vector<int64_t> feature_tables_;
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
