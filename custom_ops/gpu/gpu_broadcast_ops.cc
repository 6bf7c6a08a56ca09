// SPDX-License-Identifier: Apache-2.0
// broadcast between GPUs.
#if TFDIST_CUDA
#include <cstring>
#include <vector>

#include "custom_ops/comm/broadcast_shape.h"
#include "custom_ops/gpu/gpu_call.h"

namespace tfdist {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

namespace {

// With NCCL, the messages of the root contain only the shape. All ranks wait
// for messages of all peers, because NCCL work may begin only when all ranks
// have arrived.
struct BroadcastGpuCall : GpuCall {
  int root = 0;
  std::vector<uint8_t> message;  // the root's message

  bool at_root() const { return operation->group->rank() == root; }

  void Post() {
    Enter();
    if (at_root()) Pack();
    if (over_nccl) {
      exchange->ExpectAll();
      exchange->SendToAll(message.data(), message.size());
      return ExpectTurn();
    }
    if (!at_root()) return exchange->Expect(root);
    exchange->SendToAll(message.data(), message.size());
  }

  void Pack() {
    const Tensor& input = ctx->input(0);
    message.resize(kShapeBytes + (over_nccl ? 0 : input.TotalBytes()));
    PackShape(input.shape(), message.data());
    if (over_nccl || input.TotalBytes() == 0) return;
    const std::shared_ptr<uint8_t> data = ToHost({input});
    std::memcpy(message.data() + kShapeBytes, data.get(), input.TotalBytes());
  }

  void Run() {
    Enter();
    exchange->AwaitHeaders();
    const uint8_t* received = nullptr;
    if (!at_root()) {
      received = exchange->Receive(root);
      exchange->AwaitPayloads();
    }
    Tensor* output = at_root() ? nullptr : Allocate(received);
    if (over_nccl) {
      RunOverNccl(output);
    } else if (output != nullptr) {
      ToDevice(received + kShapeBytes, {output});
    }
    if (at_root()) ctx->set_output(0, ctx->input(0));
    exchange->AwaitSent();
  }

  Tensor* Allocate(const uint8_t* received) const {
    const size_t bytes = exchange->header(root).bytes;
    tensorflow::TensorShape shape;
    Tensor* output = nullptr;
    size_t expected = kShapeBytes;
    if (bytes >= kShapeBytes) {
      CheckOk(UnpackShape(received, &shape));
      CheckOk(ctx->allocate_output(0, shape, &output));
      operation->Keep(*output);
      expected += over_nccl ? 0 : output->TotalBytes();
    }
    if (bytes == expected) return output;
    throw OperationError(
        absl::InternalError(Message(operation->Name(), ": ", bytes,
                                    " bytes, expected ", expected, " of ",
                                    shape.DebugString())),
        true);
  }

  void RunOverNccl(Tensor* output) {
    std::vector<NcclCommunicator::Sent> out;
    std::vector<NcclCommunicator::Received> in;
    if (output != nullptr) {
      in.push_back({root, output->data(), output->TotalBytes()});
    } else {
      const Tensor& input = ctx->input(0);
      for (int step = 1; step < operation->group->world_size(); ++step) {
        out.push_back({operation->group->PeerAfter(step), input.data(),
                       input.TotalBytes()});
      }
    }
    RunInTurn([&](NcclCommunicator& nccl, const CudaStream& stream) {
      nccl.Exchange(out, in, stream.get());
    });
  }
};

class BroadcastGpuOp : public CollectiveOp {
 public:
  explicit BroadcastGpuOp(tensorflow::OpKernelConstruction* ctx)
      : CollectiveOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("root", &root_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<BroadcastGpuCall>();
    if (!call->Prepare(ctx, NewOperation(ctx, Kind::kBroadcast))) return done();
    const int world_size = call->operation->group->world_size();
    OP_REQUIRES_ASYNC(
        ctx, root_ < world_size,
        absl::InvalidArgumentError(Message("root must be below the world size ",
                                           world_size, ", received ", root_)),
        done);
    const Tensor& input = ctx->input(0);
    call->root = static_cast<int>(root_);
    call->operation->Keep(input);
    Header header;
    header.dtype = input.dtype();
    header.root = call->root;
    call->exchange = std::make_unique<Exchange>(*call->operation, header);
    if (call->over_nccl) call->exchange->SetRowsOnDevice();
    if (call->at_root() && input.dims() > kMaxDims) {
      call->exchange->SetError(Message("input has ", input.dims(),
                                       " dimensions, more than ", kMaxDims));
    }
    Start(ctx, std::move(call), false, std::move(done));
  }

 private:
  int64_t root_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Broadcast").TFDIST_ON_GPU, BroadcastGpuOp);

}  // namespace
}  // namespace tfdist
#endif  // TFDIST_CUDA
