// SPDX-License-Identifier: Apache-2.0
//
// LookupGrad on a GPU. Only the GPU knows the number of unique rows, so the
// host waits for it. The host can wait for several lookups at the same time.
#include <algorithm>
#include <memory>
#include <vector>

#include "custom_ops/codec/id_lists.h"
#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/waiter_threads.h"
#include "custom_ops/gpu/gpu_work.h"
#include "custom_ops/lookup/lookup_grad_functor_gpu.h"
#include "custom_ops/lookup/table_entries.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::errors::InvalidArgument;

// The state of a call between its stages.
struct GradCall {
  explicit GradCall(OpKernelContext* ctx) : work(ctx) {}

  GpuWork work;
  std::vector<GpuGradBlock> blocks;
  std::vector<GpuGradTable> tables;
  GpuRowGrads args = {};
  char* scratch = nullptr;
  // Host copies of args.unique_rows and args.first_unique, once they are
  // computed.
  int64_t* unique_rows = nullptr;
  int64_t* first_unique = nullptr;
};

class LookupGradGpuOp : public tensorflow::AsyncOpKernel {
 public:
  explicit LookupGradGpuOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, shapes_.Read(ctx));
    OP_REQUIRES_OK(
        ctx, ReadFeatureTables(ctx, shapes_.widths.size(), &feature_tables_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const auto call = std::make_shared<GradCall>(ctx);
    OP_REQUIRES_OK_ASYNC(ctx, Start(ctx, call.get()), done);
    const auto finish = [this, ctx, call] {
      const absl::Status status = WriteRows(ctx, call.get());
      return status.ok() ? Sum(call.get()) : status;
    };
    call->work.WhenDone(&waiters_, finish, done);
  }

 private:
  absl::Status Start(OpKernelContext* ctx, GradCall* call) const {
    const Tensor& row_splits = ctx->input(0);
    TF_RETURN_IF_ERROR(CheckIdListShapes(0, ctx->input(1), row_splits,
                                         ctx->input(2),
                                         row_splits.NumElements() - 1));
    LookupBlocks found;
    TF_RETURN_IF_ERROR(
        FindGradBlocks(ctx, feature_tables_, shapes_.widths, &found));
    TF_RETURN_IF_ERROR(PlaceTables(found, call));
    TF_RETURN_IF_ERROR(Sort(ctx, call));
    return FetchRows(call);
  }

  // Assigns the keys of each table.
  absl::Status PlaceTables(const LookupBlocks& found, GradCall* call) const {
    constexpr int64_t kMostKeys = int64_t{1} << 62;
    GpuRowGrads& args = call->args;
    for (size_t t = 0; t < shapes_.rows.size(); ++t) {
      const int64_t width = shapes_.widths[t];
      if (shapes_.rows[t] > kMostKeys - args.keys) {
        return InvalidArgument("The rows of all tables must be below ",
                               kMostKeys, " together");
      }
      call->tables.push_back({args.keys, shapes_.rows[t], width, nullptr});
      args.keys += shapes_.rows[t];
      args.widest = std::max(args.widest, width);
    }
    args.quads = true;
    for (const LookupBlock& block : found.blocks) {
      call->blocks.push_back(
          {block.table, block.first_sample, block.first_value});
      args.quads &= block.width % 4 == 0 && block.first_value % 4 == 0;
    }
    return absl::OkStatus();
  }

  static absl::Status Sort(OpKernelContext* ctx, GradCall* call) {
    const Tensor& row_splits = ctx->input(0);
    const Tensor& rows = ctx->input(1);
    GpuWork* work = &call->work;
    Upload upload(work);
    const size_t blocks_at = upload.Add(call->blocks);
    const size_t tables_at = upload.Add(call->tables);
    TF_RETURN_IF_ERROR(upload.Start());

    GpuRowGrads& args = call->args;
    args.grad = static_cast<const float*>(ctx->input(4).data());
    // If the tensor is a slice of another tensor, it may begin at any address.
    args.quads &= reinterpret_cast<uintptr_t>(args.grad) % 16 == 0;
    args.blocks = upload.At<GpuGradBlock>(blocks_at);
    args.block_count = call->blocks.size();
    args.tables = upload.At<GpuGradTable>(tables_at);
    args.table_count = call->tables.size();
    args.samples = row_splits.NumElements() - 1;
    args.row_splits = static_cast<const int64_t*>(row_splits.data());
    args.rows = static_cast<const int64_t*>(rows.data());
    args.weights = WeightsOrNull(ctx->input(2));
    args.entries = rows.NumElements();
    TF_RETURN_IF_ERROR(work->Allocate(args.entries, &args.unique_rows));
    TF_RETURN_IF_ERROR(
        work->Allocate(args.table_count + 1, &args.first_unique));
    TF_RETURN_IF_ERROR(
        work->Allocate(RowGradsScratchBytes(args), &call->scratch));
    return work->Launched(SortRowsGpu(args, call->scratch, work->stream()));
  }

  // Copies the unique rows to the host.
  static absl::Status FetchRows(GradCall* call) {
    const GpuRowGrads& args = call->args;
    GpuWork* work = &call->work;
    const int64_t firsts = args.table_count + 1;
    TF_RETURN_IF_ERROR(work->AllocatePinned(args.entries, &call->unique_rows));
    TF_RETURN_IF_ERROR(work->AllocatePinned(firsts, &call->first_unique));
    TF_RETURN_IF_ERROR(work->Copy(
        args.unique_rows, args.entries * sizeof(int64_t), call->unique_rows));
    return work->Copy(args.first_unique, firsts * sizeof(int64_t),
                      call->first_unique);
  }

  // Writes the unique rows to the outputs, and allocates the outputs for their
  // gradients.
  absl::Status WriteRows(OpKernelContext* ctx, GradCall* call) const {
    const int tables = static_cast<int>(shapes_.widths.size());
    const int64_t* first = call->first_unique;
    for (int t = 0; t < tables; ++t) {
      const int64_t unique = first[t + 1] - first[t];
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(AllocateOutput(ctx, t, {unique}, &output));
      std::copy_n(call->unique_rows + first[t], unique,
                  static_cast<int64_t*>(output->data()));
      TF_RETURN_IF_ERROR(AllocateOutput(ctx, tables + t,
                                        {unique, shapes_.widths[t]}, &output));
      call->tables[t].row_grads = static_cast<float*>(output->data());
    }
    return absl::OkStatus();
  }

  static absl::Status Sum(GradCall* call) {
    if (call->args.entries == 0) return absl::OkStatus();
    GpuWork* work = &call->work;
    Upload upload(work);
    const size_t tables_at = upload.Add(call->tables);
    TF_RETURN_IF_ERROR(upload.Start());
    call->args.tables = upload.At<GpuGradTable>(tables_at);
    return work->Launched(
        SumRowGradsGpu(call->args, call->scratch, work->stream()));
  }

  std::vector<int64_t> feature_tables_;
  TableShapes shapes_;
  WaiterThreads waiters_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>LookupGrad")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("served")
                            .HostMemory("unique_rows"),
                        LookupGradGpuOp);

}  // namespace
}  // namespace tfdist
