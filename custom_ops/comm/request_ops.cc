// SPDX-License-Identifier: Apache-2.0
// Requests of one rank to all others, which answer them at any time.
//
// In a collective, all ranks run the same operation. A request is different: a
// rank sends a message to every rank, also to itself, and each of them serves
// the message while it runs something else. Served messages of a peer come in
// the order of its requests.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/comm/collective_op.h"
#include "custom_ops/comm/request_state.h"
#include "custom_ops/common/message.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>Request")
    .Input("tables: N * resource")
    .Input("payload: uint8")
    .Input("splits: int64")
    .Input("step: int64")
    .Output("values: T")
    .Output("value_splits: int64")
    .TFDIST_COLLECTIVE_ATTRS.Attr("N: int >= 0")
    .Attr("table_shapes: list(shape)")
    .Attr("shards: list(string)")
    .Attr("replies: bool")
    .Attr("T: {uint8, float, bfloat16, half}")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->input(c->num_inputs() - 2));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sends a message to every rank and returns what their Serve and Reply answer.

tables: variables that the replies are computed from, for the gradient. The
  kernel does not read them.
payload: [bytes], the message to rank 0, then the message to rank 1, and so on.
splits: [world_size], bytes of each message.
step: scalar, a number that is sent with the messages.
values: [n], the reply of rank 0, then the reply of rank 1, and so on. Empty if
  `replies` is false.
value_splits: [world_size], values of each reply.
table_shapes: shapes of the tables.
shards: for each table the shard that its gradient belongs to, as JSON.
replies: whether the ranks reply. If not, the op does not wait for them.
)doc");

namespace {

// One request of this rank.
struct RequestCall {
  OpKernelContext* ctx;
  std::shared_ptr<Operation> operation;
  int64_t own_queue = 0;  // see QueueOf
  bool replies = true;
  int64_t item = 1;  // bytes of a value
  int64_t step = 0;
  std::vector<int64_t> starts;  // of the messages, and the end of the last one
  std::vector<Incoming*> answers;
  std::shared_ptr<OwnMessage> own;

  ProcessGroup& group() const { return *operation->group; }

  void Post() {
    const Tensor& payload = ctx->input(ctx->num_inputs() - 3);
    const auto* bytes = payload.flat<uint8_t>().data();
    operation->Keep(payload);
    answers.resize(group().world_size());
    for (int i = 1; i < group().world_size(); ++i) {
      const int peer = group().PeerAfter(i);
      if (replies) answers[peer] = operation->Expect(peer, kReplyPart);
      Header header;
      header.part = kMessagePart;
      header.bytes = starts[peer + 1] - starts[peer];
      header.rows = step;
      operation->Send(peer, header, bytes + starts[peer]);
    }
    const int rank = group().rank();
    own = std::make_shared<OwnMessage>();
    own->generation = operation->generation;
    own->step = step;
    own->request = operation;
    const int64_t size = starts[rank + 1] - starts[rank];
    own->payload = Tensor(tensorflow::DT_UINT8, TensorShape({size}));
    if (size > 0) {
      std::memcpy(own->payload.data(), bytes + starts[rank], size);
    }
    group().requests().Push(own_queue, own);
  }

  void Run() {
    std::vector<int64_t> bytes(group().world_size());
    if (replies) AwaitReplies(bytes);
    int64_t total = 0;
    for (int64_t& each : bytes) {
      if (each % item != 0) {
        throw OperationError(
            absl::InternalError(Message(operation->Name(), ": a reply of ",
                                        each, " bytes has no whole number of ",
                                        item, "-byte values")),
            true);
      }
      each /= item;
      total += each;
    }
    Tensor* values = nullptr;
    CheckOk(ctx->allocate_output(0, TensorShape({total}), &values));
    Tensor* splits = nullptr;
    CheckOk(
        ctx->allocate_output(1, TensorShape({group().world_size()}), &splits));
    auto* to = static_cast<uint8_t*>(values->data());
    for (int peer = 0; peer < group().world_size(); ++peer) {
      splits->flat<int64_t>()(peer) = bytes[peer];
      const size_t size = bytes[peer] * item;
      if (size > 0) {
        if (peer == group().rank()) {
          std::memcpy(to, own->reply.data(), size);
        } else {
          operation->Give(peer, answers[peer], to, size);
        }
      }
      to += size;
    }
    for (int peer = 0; peer < group().world_size(); ++peer) {
      if (bytes[peer] > 0 && peer != group().rank()) {
        operation->AwaitBytes(peer, answers[peer], bytes[peer] * item,
                              "receive reply");
      }
    }
    operation->AwaitSent("send");
  }

  // Sets the bytes of each reply. Throws the error of a rank that has one.
  void AwaitReplies(std::vector<int64_t>& bytes) {
    std::string error;
    for (int i = 1; i < group().world_size(); ++i) {
      const int peer = group().PeerBefore(i);
      Incoming* answer = answers[peer];
      operation->AwaitHeader(peer, answer, "await reply");
      bytes[peer] = answer->header.bytes;
      if ((answer->header.flags & kErrorFlag) == 0) continue;
      const uint8_t* text = operation->TakeEarly(peer, answer);
      operation->AwaitBytes(peer, answer, bytes[peer], "receive reply");
      error.assign(reinterpret_cast<const char*>(text), bytes[peer]);
    }
    operation->AwaitLocal([this] { return own->HasReply(); }, "await reply");
    if (!own->error.empty()) error = own->error;
    bytes[group().rank()] = own->reply.TotalBytes();
    if (error.empty()) return;
    operation->AwaitSent("send");
    throw OperationError(
        absl::InvalidArgumentError(Message(operation->Name(), ": ", error)),
        false);
  }
};

class RequestOp : public CollectiveOp {
 public:
  explicit RequestOp(OpKernelConstruction* ctx) : CollectiveOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("replies", &replies_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<RequestCall>();
    call->ctx = ctx;
    std::shared_ptr<Operation> checked = NewOperation(ctx, Kind::kRequest);
    if (checked == nullptr) return done();
    const std::shared_ptr<ProcessGroup> group = checked->group;
    call->operation = std::make_shared<Operation>(
        group, Kind::kRequest, QueueOf(tag_, group->rank()), label_);
    call->own_queue = QueueOf(tag_, group->world_size());
    call->replies = replies_;
    call->item = tensorflow::DataTypeSize(dtype_);
    const int inputs = ctx->num_inputs();
    const Tensor& payload = ctx->input(inputs - 3);
    const Tensor& splits = ctx->input(inputs - 2);
    const Tensor& step = ctx->input(inputs - 1);
    OP_REQUIRES_ASYNC(
        ctx,
        payload.dims() == 1 && splits.dims() == 1 && step.dims() == 0 &&
            splits.NumElements() == group->world_size(),
        tensorflow::errors::InvalidArgument(
            "payload must be [bytes], splits [world_size] and step a scalar, "
            "received ",
            payload.shape().DebugString(), ", ", splits.shape().DebugString(),
            " and ", step.shape().DebugString()),
        done);
    call->step = step.scalar<int64_t>()();
    call->starts.push_back(0);
    for (int peer = 0; peer < group->world_size(); ++peer) {
      const int64_t size = splits.flat<int64_t>()(peer);
      OP_REQUIRES_ASYNC(ctx, size >= 0,
                        tensorflow::errors::InvalidArgument(
                            "splits must not be negative, received ", size),
                        done);
      call->starts.push_back(call->starts.back() + size);
    }
    OP_REQUIRES_ASYNC(
        ctx, call->starts.back() == payload.NumElements(),
        tensorflow::errors::InvalidArgument(
            "the sum of splits must be the size of payload, received ",
            call->starts.back(), " and ", payload.NumElements()),
        done);
    const bool small =
        static_cast<size_t>(payload.NumElements()) <= kPostInline;
    Start(ctx, std::move(call), small, std::move(done));
  }

 private:
  bool replies_ = true;
  tensorflow::DataType dtype_ = tensorflow::DT_UINT8;
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>Request").Device(tensorflow::DEVICE_CPU).HostMemory("tables"),
    RequestOp);
}  // namespace
}  // namespace tfdist
