// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <vector>

#include "custom_ops/comm/broadcast_shape.h"
#include "custom_ops/comm/collective_op.h"
#include "custom_ops/comm/exchange.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>Broadcast")
    .Input("input: T")
    .Output("output: T")
    .TFDIST_COLLECTIVE_ATTRS.Attr("root: int >= 0")
    .Attr("T: {bool, uint8, int8, int32, int64, float, double, bfloat16, half}")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->UnknownShape());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Copies the tensor of rank `root` to all ranks.

input: the tensor to copy on rank `root`. Other ranks pass any tensor of this
  dtype.
output: copy of the tensor of rank `root`, in its shape.
)doc");

REGISTER_OP("Tfdist>Barrier")
    .TFDIST_COLLECTIVE_ATTRS.SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Waits until all ranks have started this op.");

namespace {

// The payload of the root starts with its shape.
struct BroadcastCall {
  OpKernelContext* ctx;
  std::shared_ptr<Operation> operation;
  std::unique_ptr<Exchange> exchange;
  int root = 0;
  std::shared_ptr<uint8_t> message;
  size_t bytes = 0;

  void Pack(const Tensor& input) {
    bytes = kShapeBytes + input.TotalBytes();
    message = operation->group->scratch().Acquire(bytes);
    operation->Keep(message);
    PackShape(input.shape(), message.get());
    if (input.TotalBytes() == 0) return;
    std::memcpy(message.get() + kShapeBytes, input.data(), input.TotalBytes());
  }

  void Post() {
    if (operation->group->rank() != root) return exchange->Expect(root);
    exchange->SendToAll(message.get(), bytes);
  }

  void Run() {
    exchange->AwaitHeaders();
    if (operation->group->rank() == root) {
      ctx->set_output(0, ctx->input(0));
    } else {
      bytes = exchange->header(root).bytes;
      message = operation->group->scratch().Acquire(bytes);
      operation->Keep(message);
      exchange->ReceiveInto(root, message.get());
      exchange->AwaitPayloads();
      Unpack();
    }
    exchange->AwaitSent();
  }

  void Unpack() const {
    if (bytes < kShapeBytes) {
      throw OperationError(
          absl::InternalError(Message(operation->Name(), ": ", bytes,
                                      " bytes, fewer than those of a shape")),
          true);
    }
    tensorflow::TensorShape shape;
    CheckOk(UnpackShape(message.get(), &shape));
    Tensor* output = nullptr;
    CheckOk(ctx->allocate_output(0, shape, &output));
    if (output->TotalBytes() != bytes - kShapeBytes) {
      throw OperationError(absl::InternalError(Message(
                               operation->Name(), ": ", bytes - kShapeBytes,
                               " bytes for shape ", shape.DebugString())),
                           true);
    }
    if (output->TotalBytes() == 0) return;
    std::memcpy(output->data(), message.get() + kShapeBytes,
                output->TotalBytes());
  }
};

class BroadcastOp : public CollectiveOp {
 public:
  explicit BroadcastOp(tensorflow::OpKernelConstruction* ctx)
      : CollectiveOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("root", &root_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<BroadcastCall>();
    call->ctx = ctx;
    call->root = static_cast<int>(root_);
    call->operation = NewOperation(ctx, Kind::kBroadcast);
    if (call->operation == nullptr) return done();
    const int world_size = call->operation->group->world_size();
    OP_REQUIRES_ASYNC(ctx, root_ < world_size,
                      tensorflow::errors::InvalidArgument(
                          "root must be below the world size ", world_size,
                          ", received ", root_),
                      done);
    const Tensor& input = ctx->input(0);
    Header header;
    header.dtype = input.dtype();
    header.root = static_cast<int32_t>(root_);
    call->exchange = std::make_unique<Exchange>(*call->operation, header);
    if (call->operation->group->rank() == root_) {
      if (input.dims() > kMaxDims) {
        call->exchange->SetError(Message("input has ", input.dims(),
                                         " dimensions, more than ", kMaxDims));
      }
      call->Pack(input);
    }
    const bool small = call->bytes * (world_size - 1) <= kPostInline;
    Start(ctx, std::move(call), small, std::move(done));
  }

 private:
  int64_t root_ = 0;
};

struct BarrierCall {
  std::shared_ptr<Operation> operation;
  std::unique_ptr<Exchange> exchange;

  void Post() {
    exchange->ExpectAll();
    exchange->SendToAll(nullptr, 0);
  }

  void Run() {
    exchange->AwaitHeaders();
    exchange->AwaitSent();
  }
};

class BarrierOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<BarrierCall>();
    call->operation = NewOperation(ctx, Kind::kBarrier);
    if (call->operation == nullptr) return done();
    call->exchange = std::make_unique<Exchange>(*call->operation, Header());
    call->exchange->SetExpectedBytes(0);
    Start(ctx, std::move(call), true, std::move(done));
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Broadcast").Device(tensorflow::DEVICE_CPU),
                        BroadcastOp);
REGISTER_KERNEL_BUILDER(Name("Tfdist>Barrier").Device(tensorflow::DEVICE_CPU),
                        BarrierOp);

}  // namespace
}  // namespace tfdist
