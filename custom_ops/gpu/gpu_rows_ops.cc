// SPDX-License-Identifier: Apache-2.0
// all_to_all and all_gather between GPUs. Each rank announces how many of its
// rows it sends to each rank.
#if TFDIST_CUDA
#include <cstring>
#include <vector>

#include "custom_ops/comm/all_to_all_splits.h"
#include "custom_ops/common/allocate_output.h"
#include "custom_ops/gpu/gpu_call.h"

namespace tfdist {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

namespace {

struct RowsCall : GpuCall {
  struct Piece {
    uint64_t begin = 0;  // offset in the input, in bytes
    int64_t rows = 0;
  };
  std::vector<Piece> sent;  // by rank
  uint64_t row_bytes = 0;
  std::shared_ptr<uint8_t> host_input;

  void Post() {
    Enter();
    const ProcessGroup& group = *operation->group;
    if (!over_nccl) host_input = ToHost({ctx->input(0)});
    exchange->ExpectAll();
    for (int step = 1; step < group.world_size(); ++step) {
      const int peer = group.PeerAfter(step);
      const Piece& piece = sent[peer];
      if (over_nccl) {
        exchange->SendRowCount(peer, piece.rows);
      } else {
        exchange->SendRows(peer, host_input.get() + piece.begin, piece.rows);
      }
    }
    if (over_nccl) ExpectTurn();
  }

  void Run() {
    Enter();
    exchange->AwaitHeaders();
    const std::vector<int64_t> rows = RowsOfRanks();
    int64_t total = 0;
    for (int64_t each : rows) total += each;
    tensorflow::TensorShape shape = ctx->input(0).shape();
    CheckOk(shape.SetDimWithStatus(0, total));
    Tensor* output = nullptr;
    CheckOk(ctx->allocate_output(0, shape, &output));
    operation->Keep(*output);
    if (over_nccl) {
      RunOverNccl(rows, static_cast<char*>(output->data()));
    } else {
      RunThroughHost(rows, output);
    }
  }

  std::vector<int64_t> RowsOfRanks() {
    const int world_size = operation->group->world_size();
    Tensor* splits = nullptr;
    CheckOk(AllocateOutput(ctx, 1, {world_size}, &splits));
    std::vector<int64_t> rows(world_size);
    for (int peer = 0; peer < world_size; ++peer) {
      const bool own = peer == operation->group->rank();
      rows[peer] = own ? sent[peer].rows : exchange->header(peer).rows;
      splits->vec<int64_t>()(peer) = rows[peer];
    }
    return rows;
  }

  void RunOverNccl(const std::vector<int64_t>& rows, char* output) {
    const char* input = static_cast<const char*>(ctx->input(0).data());
    const int rank = operation->group->rank();
    std::vector<NcclCommunicator::Sent> out;
    std::vector<NcclCommunicator::Received> in;
    char* own = nullptr;
    for (int peer = 0; peer < operation->group->world_size(); ++peer) {
      if (peer == rank) own = output;
      if (peer != rank) {
        out.push_back(
            {peer, input + sent[peer].begin, sent[peer].rows * row_bytes});
        in.push_back({peer, output, rows[peer] * row_bytes});
      }
      output += rows[peer] * row_bytes;
    }
    RunInTurn([&](NcclCommunicator& nccl, const CudaStream& stream) {
      stream.Copy(own, input + sent[rank].begin, rows[rank] * row_bytes);
      nccl.Exchange(out, in, stream.get());
    });
  }

  void RunThroughHost(const std::vector<int64_t>& rows, Tensor* output) {
    const std::shared_ptr<uint8_t> host_output =
        links->Pinned(*operation, output->TotalBytes());
    const int rank = operation->group->rank();
    uint8_t* place = host_output.get();
    for (int peer = 0; peer < operation->group->world_size(); ++peer) {
      const size_t bytes = rows[peer] * row_bytes;
      if (peer != rank) {
        exchange->ReceiveInto(peer, place);
      } else if (bytes > 0) {
        std::memcpy(place, host_input.get() + sent[rank].begin, bytes);
      }
      place += bytes;
    }
    exchange->AwaitPayloads();
    exchange->AwaitSent();
    ToDevice(host_output.get(), {output});
  }
};

// Common part of all_to_all and all_gather.
class RowsOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;

 protected:
  // Returns null, and sets the status of the context, on an error.
  std::shared_ptr<RowsCall> NewCall(OpKernelContext* ctx, Kind kind) const {
    auto call = std::make_shared<RowsCall>();
    if (!call->Prepare(ctx, NewOperation(ctx, kind))) return nullptr;
    const Tensor& input = ctx->input(0);
    Header header;
    header.dtype = input.dtype();
    SetRowShape(header, input.shape());
    header.agreed = call->row_bytes = RowBytes(input);
    call->exchange = std::make_unique<Exchange>(*call->operation, header);
    if (call->over_nccl) call->exchange->SetRowsOnDevice();
    call->sent.resize(call->operation->group->world_size());
    call->operation->Keep(input);
    return call;
  }
};

class AllToAllGpuOp : public RowsOp {
 public:
  using RowsOp::RowsOp;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    std::shared_ptr<RowsCall> call = NewCall(ctx, Kind::kAllToAll);
    if (call == nullptr) return done();
    const std::string error =
        CheckSplits(ctx->input(0), ctx->input(1), call->sent.size());
    if (!error.empty()) call->exchange->SetError(error);
    uint64_t begin = 0;
    for (size_t peer = 0; error.empty() && peer < call->sent.size(); ++peer) {
      const int64_t rows = ctx->input(1).vec<int64_t>()(peer);
      call->sent[peer] = {begin, rows};
      begin += rows * call->row_bytes;
    }
    Start(ctx, std::move(call), false, std::move(done));
  }
};

class AllGatherGpuOp : public RowsOp {
 public:
  using RowsOp::RowsOp;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    std::shared_ptr<RowsCall> call = NewCall(ctx, Kind::kAllGather);
    if (call == nullptr) return done();
    if (ctx->input(0).dims() < 1) {
      call->exchange->SetError("input must have at least one dimension");
    } else {
      call->sent.assign(call->sent.size(), {0, ctx->input(0).dim_size(0)});
    }
    Start(ctx, std::move(call), false, std::move(done));
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>AllToAll")
                            .TFDIST_ON_GPU.HostMemory("send_splits")
                            .HostMemory("recv_splits"),
                        AllToAllGpuOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>AllGather").TFDIST_ON_GPU.HostMemory("splits"),
    AllGatherGpuOp);

}  // namespace
}  // namespace tfdist
#endif  // TFDIST_CUDA
