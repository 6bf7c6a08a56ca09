// SPDX-License-Identifier: Apache-2.0
//
// LookupGrad on a GPU. How many rows are unique is known there alone: the one
// time in a step that the host waits.
#include <algorithm>
#include <vector>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/gpu_work.h"
#include "custom_ops/embedding/lookup_grad_functor_gpu.h"
#include "custom_ops/embedding/table_entries.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::errors::InvalidArgument;

// What a call passes from one stage to the next.
struct Call {
  std::vector<GpuGradBlock> blocks;
  std::vector<GpuGradTable> tables;
  GpuRowGrads args = {};
  char* scratch = nullptr;
};

class LookupGradGpuOp : public tensorflow::OpKernel {
 public:
  explicit LookupGradGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("widths", &widths_));
    OP_REQUIRES_OK(ctx,
                   ReadFeatureTables(ctx, widths_.size(), &feature_tables_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<TableEntries> tables;
    OP_REQUIRES_OK(ctx,
                   FindTableEntries(ctx, feature_tables_, widths_, &tables));
    Call call;
    OP_REQUIRES_OK(ctx, PlaceTables(tables, &call));
    GpuWork work(ctx);
    OP_REQUIRES_OK(ctx, Sort(ctx, &work, &call));
    OP_REQUIRES_OK(ctx, WriteRows(ctx, &work, &call));
    OP_REQUIRES_OK(ctx, Sum(&work, &call));
  }

 private:
  // Gives every table its keys.
  absl::Status PlaceTables(const std::vector<TableEntries>& tables,
                           Call* call) const {
    constexpr int64_t kMostKeys = int64_t{1} << 62;
    call->args.quads = true;
    for (size_t t = 0; t < tables.size(); ++t) {
      int64_t limit = 0;
      TF_RETURN_IF_ERROR(RowLimit(tables[t], &limit));
      if (limit > kMostKeys - call->args.keys) {
        return InvalidArgument("The rows of all tables must be below ",
                               kMostKeys, " together");
      }
      call->tables.push_back({call->args.keys, limit, widths_[t], nullptr});
      call->args.keys += limit;
      call->args.widest = std::max(call->args.widest, widths_[t]);
      for (const LookupBlock& block : tables[t].blocks) {
        call->blocks.push_back(
            {static_cast<int64_t>(t), block.first_sample, block.first_value});
        call->args.quads &= block.width % 4 == 0 && block.first_value % 4 == 0;
      }
    }
    std::sort(call->blocks.begin(), call->blocks.end(),
              [](const GpuGradBlock& a, const GpuGradBlock& b) {
                return a.first_sample < b.first_sample;
              });
    return absl::OkStatus();
  }

  absl::Status Sort(OpKernelContext* ctx, GpuWork* work, Call* call) const {
    const Tensor& row_splits = ctx->input(0);
    const Tensor& rows = ctx->input(1);
    const Tensor& weights = ctx->input(2);
    Upload upload(work);
    const size_t blocks_at = upload.Add(call->blocks);
    const size_t tables_at = upload.Add(call->tables);
    const size_t splits_at =
        upload.Add(static_cast<const int64_t*>(row_splits.data()),
                   row_splits.NumElements());
    const size_t rows_at = upload.Add(static_cast<const int64_t*>(rows.data()),
                                      rows.NumElements());
    const size_t weights_at = upload.Add(
        static_cast<const float*>(weights.data()), weights.NumElements());
    TF_RETURN_IF_ERROR(upload.Start());

    GpuRowGrads& args = call->args;
    args.grad = static_cast<const float*>(ctx->input(4).data());
    // A part of another tensor may begin anywhere.
    args.quads &= reinterpret_cast<uintptr_t>(args.grad) % 16 == 0;
    args.blocks = upload.At<GpuGradBlock>(blocks_at);
    args.block_count = call->blocks.size();
    args.tables = upload.At<GpuGradTable>(tables_at);
    args.table_count = call->tables.size();
    args.samples = row_splits.NumElements() - 1;
    args.row_splits = upload.At<int64_t>(splits_at);
    args.rows = upload.At<int64_t>(rows_at);
    if (weights.NumElements() > 0) args.weights = upload.At<float>(weights_at);
    args.entries = rows.NumElements();
    TF_RETURN_IF_ERROR(work->Room(args.entries, &args.unique_rows));
    TF_RETURN_IF_ERROR(work->Room(args.table_count + 1, &args.first_unique));
    TF_RETURN_IF_ERROR(work->Room(RowGradsScratchBytes(args), &call->scratch));
    return work->Launched(SortRowsGpu(args, call->scratch, work->stream()));
  }

  // Waits for the unique rows and makes room for their gradients.
  absl::Status WriteRows(OpKernelContext* ctx, GpuWork* work,
                         Call* call) const {
    const GpuRowGrads& args = call->args;
    int64_t* rows = nullptr;
    int64_t* first = nullptr;
    TF_RETURN_IF_ERROR(work->PinnedRoom(args.entries, &rows));
    TF_RETURN_IF_ERROR(work->PinnedRoom(args.table_count + 1, &first));
    TF_RETURN_IF_ERROR(
        work->Copy(args.unique_rows, args.entries * sizeof(int64_t), rows));
    TF_RETURN_IF_ERROR(work->Copy(
        args.first_unique, (args.table_count + 1) * sizeof(int64_t), first));
    TF_RETURN_IF_ERROR(work->Wait());
    const int tables = static_cast<int>(widths_.size());
    for (int t = 0; t < tables; ++t) {
      const int64_t unique = first[t + 1] - first[t];
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(AllocateOutput(ctx, t, {unique}, &output));
      std::copy_n(rows + first[t], unique,
                  static_cast<int64_t*>(output->data()));
      TF_RETURN_IF_ERROR(
          AllocateOutput(ctx, tables + t, {unique, widths_[t]}, &output));
      call->tables[t].row_grads = static_cast<float*>(output->data());
    }
    return absl::OkStatus();
  }

  static absl::Status Sum(GpuWork* work, Call* call) {
    if (call->args.entries == 0) return absl::OkStatus();
    Upload upload(work);
    const size_t tables_at = upload.Add(call->tables);
    TF_RETURN_IF_ERROR(upload.Start());
    call->args.tables = upload.At<GpuGradTable>(tables_at);
    return work->Launched(
        SumRowGradsGpu(call->args, call->scratch, work->stream()));
  }

  std::vector<int64_t> feature_tables_;
  std::vector<int64_t> widths_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>LookupGrad")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("row_splits")
                            .HostMemory("rows")
                            .HostMemory("weights")
                            .HostMemory("served")
                            .HostMemory("unique_rows"),
                        LookupGradGpuOp);

}  // namespace
}  // namespace tfdist
