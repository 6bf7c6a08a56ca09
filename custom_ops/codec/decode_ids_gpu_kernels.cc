// SPDX-License-Identifier: Apache-2.0
//
// DecodeIds on a GPU. The messages are in host memory, and the host reads their
// headers. The GPU decodes the ids. The host waits until it knows whether all
// ids could be decoded.
#include <memory>
#include <vector>

#include "custom_ops/codec/decode_ids_functor_gpu.h"
#include "custom_ops/codec/id_messages.h"
#include "custom_ops/codec/placement_plan.h"
#include "custom_ops/common/waiter_threads.h"
#include "custom_ops/gpu/gpu_work.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// The state of a call until its ids are decoded.
struct DecodeCall {
  DecodeCall(OpKernelContext* ctx, const PlacementPlan& plan, int64_t rank)
      : messages(plan, rank), work(ctx) {}

  IdMessages messages;
  GpuWork work;
  std::vector<IdBlock> blocks;
  uint64_t* status = nullptr;  // of GpuDecodeIds, in host memory
};

class DecodeIdsGpuOp : public tensorflow::AsyncOpKernel {
 public:
  explicit DecodeIdsGpuOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, plan_.Read(ctx));
    OP_REQUIRES_OK(ctx, plan_.ReadRank(ctx, &rank_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const auto call = std::make_shared<DecodeCall>(ctx, plan_, rank_);
    OP_REQUIRES_OK_ASYNC(ctx, call->messages.Read(ctx), done);
    OP_REQUIRES_OK_ASYNC(ctx, call->messages.WriteRanks(ctx), done);
    OP_REQUIRES_OK_ASYNC(ctx, Decode(ctx, call.get()), done);
    call->work.WhenDone(&waiters_, [call] { return Check(*call); }, done);
  }

 private:
  static absl::Status Decode(OpKernelContext* ctx, DecodeCall* call) {
    std::vector<GpuIdSection> sections;
    for (const IdMessages::Part& part : call->messages.parts()) {
      for (size_t b = 0; b < part.reader.blocks().size(); ++b) {
        call->blocks.push_back(IdMessages::BlockOf(part, b));
        call->blocks.back().section = sections.size();
      }
      sections.push_back({part.reader.codes(), call->messages.RowLimit(part)});
    }
    const Tensor& payload = ctx->input(0);
    GpuWork* work = &call->work;
    Upload upload(work);
    const size_t payload_at = upload.Add(
        static_cast<const uint8_t*>(payload.data()), payload.NumElements());
    const size_t sections_at = upload.Add(sections);
    const size_t blocks_at = upload.Add(call->blocks);
    TF_RETURN_IF_ERROR(upload.Start());
    GpuDecodeIds args = {upload.At<uint8_t>(payload_at),
                         upload.At<GpuIdSection>(sections_at),
                         upload.At<IdBlock>(blocks_at),
                         static_cast<int64_t>(call->blocks.size()),
                         {},
                         nullptr};
    TF_RETURN_IF_ERROR(call->messages.AllocateEntries(ctx, &args.to));
    TF_RETURN_IF_ERROR(work->Allocate(1, &args.status));
    TF_RETURN_IF_ERROR(work->AllocatePinned(1, &call->status));
    TF_RETURN_IF_ERROR(work->Launched(DecodeIdsGpu(args, work->stream())));
    return work->Copy(args.status, sizeof(*args.status), call->status);
  }

  static absl::Status Check(const DecodeCall& call) {
    if (*call.status == kAllDecoded) return absl::OkStatus();
    const IdBlock& block = call.blocks[*call.status >> 8];
    return call.messages.Malformed(call.messages.parts()[block.section],
                                   static_cast<IdError>(*call.status & 0xFF));
  }

  PlacementPlan plan_;
  int64_t rank_ = 0;
  WaiterThreads waiters_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>DecodeIds")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("payload")
                            .HostMemory("splits")
                            .HostMemory("served")
                            .HostMemory("samples"),
                        DecodeIdsGpuOp);

}  // namespace
}  // namespace tfdist
