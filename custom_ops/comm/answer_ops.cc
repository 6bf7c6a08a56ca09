// SPDX-License-Identifier: Apache-2.0
// Answers to the requests of all ranks; see request_ops.cc.
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

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

REGISTER_OP("Tfdist>Serve")
    .Input("peer: int64")
    .Input("handler: int64")
    .Output("payload: uint8")
    .Output("step: int64")
    .TFDIST_COLLECTIVE_ATTRS.Attr("replies: bool")
    .Attr("bound: int")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Waits, without a limit, for the next message of `peer` in a Request of this tag.

If the request has replies, the op also takes the lock of this rank's rows and
variables. A Reply must follow, which releases the lock.

peer: scalar, the rank that sends the message.
handler: scalar, the number that SetHandler was given for this tag. The op ends
  without a message when another number is set.
payload: [bytes], the message, or the reason why there is none.
step: scalar, the number that was sent with the message. -1 if a rank has left
  the generation, -2 if the group has failed or is closed, -3 if the handler has
  been replaced.
replies: whether the request has replies.
bound: if not negative, the op also waits until no clock of SetClock is more
  than so many steps behind the step of the message.
)doc");

REGISTER_OP("Tfdist>Reply")
    .Input("peer: int64")
    .Input("values: T")
    .Input("error: string")
    .TFDIST_COLLECTIVE_ATTRS.Attr("T: {uint8, float, bfloat16, half}")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Answers the message that the last Serve of the tag and peer has returned.

The op does not fail if the request has ended meanwhile.

peer: scalar, the rank that has sent the message.
values: [n], the reply.
error: scalar; if it is not empty, the Request fails with this text.
)doc");

REGISTER_OP("Tfdist>SetHandler")
    .Input("handler: int64")
    .TFDIST_COLLECTIVE_ATTRS.SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Sets the handler of the messages with a tag, and ends the Serve ops of others.

handler: scalar, a number; see Serve.
)doc");

REGISTER_OP("Tfdist>SetClock")
    .Input("peer: int64")
    .Input("step: int64")
    .TFDIST_COLLECTIVE_ATTRS.SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Sets the clock of a rank, the number of steps that it has completed; see Serve.

A lower number than the current one has no effect.

peer: scalar, the rank.
step: scalar, the number.
)doc");

namespace {

// Steps that Serve returns without a message.
constexpr int64_t kLeft = -1;
constexpr int64_t kEnded = -2;
constexpr int64_t kStopped = -3;

// Returns an input of `ctx`, a scalar. Throws OperationError.
int64_t Scalar(OpKernelContext* ctx, int input) {
  const Tensor& value = ctx->input(input);
  if (value.NumElements() != 1) {
    throw OperationError(absl::InvalidArgumentError(Message(
                             "an input must be a scalar, received shape ",
                             value.shape().DebugString())),
                         false);
  }
  return value.flat<int64_t>()(0);
}

// Receives one message, gives it to a server, and sends the reply that a Reply
// op sets.
struct ServeCall {
  std::shared_ptr<Operation> operation;
  int peer = 0;
  int64_t queue = 0;
  int64_t bound = -1;
  bool replies = true;
  Incoming* message = nullptr;
  std::shared_ptr<OwnMessage> own;
  Tensor payload{tensorflow::DT_UINT8};
  int64_t step = 0;
  std::optional<Server> server;  // that has been given no message yet
  std::shared_ptr<Served> served;

  RequestState& state() const { return operation->group->requests(); }
  bool is_own() const { return peer == operation->group->rank(); }

  void Post() {
    if (is_own()) {
      state().Await(queue, operation);
    } else {
      message = operation->Expect(peer, kMessagePart);
    }
  }

  void Run() {
    is_own() ? TakeOwn() : Receive();
    state().Notify(operation);
    if (bound >= 0) {
      operation->AwaitLocal([this] { return state().AllReached(step - bound); },
                            "await clocks");
    }
    operation->AwaitLocal([this] { return state().TakeServer(queue, &server); },
                          "await server");
    if (!replies) return;  // Finish gives the message to the server
    operation->AwaitLocal([this] { return state().TryLock(queue); },
                          "await lock");
    state().Ignore(operation);
    served = std::make_shared<Served>();
    served->operation = operation;
    state().SetServed(queue, served);
    Give(payload, step);
    operation->AwaitLocal([this] { return served->HasReply(); }, "serve");
    if (is_own()) return own->SetReply(served->reply, served->error);
    Header header;
    header.part = kReplyPart;
    const void* data = served->reply.data();
    header.bytes = served->reply.TotalBytes();
    if (!served->error.empty()) {
      header.flags |= kErrorFlag;
      header.bytes = served->error.size();
      data = served->error.data();
    }
    operation->Send(peer, header, data);
    operation->AwaitSent("send reply");
  }

  void TakeOwn() {
    operation->AwaitLocal(
        [this] {
          if (own == nullptr) own = state().Pop(queue, operation->generation);
          return own != nullptr;
        },
        "await request");
    payload = own->payload;
    step = own->step;
  }

  void Receive() {
    operation->AwaitHeader(peer, message, "await request");
    const auto bytes = static_cast<int64_t>(message->header.bytes);
    payload = Tensor(tensorflow::DT_UINT8, TensorShape({bytes}));
    if (bytes > 0) {
      operation->Give(peer, message, payload.data(), bytes);
      operation->AwaitBytes(peer, message, bytes, "receive request");
    }
    step = message->header.rows;
  }

  // Completes the op of the server.
  void Give(const Tensor& bytes, int64_t number) {
    const Server taken = *std::exchange(server, std::nullopt);
    SetOutputs(taken.ctx, bytes, number);
    taken.done();
  }

  static void SetOutputs(OpKernelContext* ctx, const Tensor& payload,
                         int64_t step) {
    Tensor number(tensorflow::DT_INT64, TensorShape({}));
    number.scalar<int64_t>()() = step;
    ctx->set_output(0, payload);
    ctx->set_output(1, number);
  }

  // Called once, when the operation has ended. A server that ends is no failure
  // of a step, so the op succeeds and returns the reason.
  void Finish(const absl::Status& status) {
    state().Ignore(operation);
    std::optional<Server> waiting = state().Detach(queue, operation);
    if (waiting.has_value()) server = std::move(waiting);
    if (server.has_value()) {
      if (status.ok()) return Give(payload, step);
      const auto size = static_cast<int64_t>(status.message().size());
      Tensor reason(tensorflow::DT_UINT8, TensorShape({size}));
      std::memcpy(reason.data(), status.message().data(), size);
      Give(reason, absl::IsAborted(status) ? kLeft : kEnded);
    }
    if (served == nullptr) return;
    state().TakeServed(queue);
    std::function<void()> sent;
    {
      std::lock_guard<std::mutex> lock(served->mutex);
      sent = std::move(served->sent);
      served->sent = nullptr;
      served->replied = true;
    }
    if (sent) sent();
  }
};

// Base class of the kernels that answer requests.
class AnswerOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) final {
    std::shared_ptr<Operation> checked = NewOperation(ctx, Kind::kRequest);
    if (checked == nullptr) return done();
    bool waits = false;
    try {
      waits = Compute(ctx, checked->group, done);
    } catch (const OperationError& error) {
      ctx->SetStatus(error.status);
    }
    if (!waits) done();
  }

 protected:
  // Returns whether the op calls `done` later. May throw OperationError.
  virtual bool Compute(OpKernelContext* ctx,
                       const std::shared_ptr<ProcessGroup>& group,
                       const DoneCallback& done) = 0;

  // The first input of the op.
  static int Peer(OpKernelContext* ctx, const ProcessGroup& group) {
    const int64_t peer = Scalar(ctx, 0);
    if (peer < 0 || peer >= group.world_size()) {
      throw OperationError(absl::InvalidArgumentError(Message(
                               "peer must be in [0, ", group.world_size(),
                               "), the ranks, received ", peer)),
                           false);
    }
    return static_cast<int>(peer);
  }

  int64_t QueueOfPeer(const ProcessGroup& group, int peer) const {
    return QueueOf(tag_, peer == group.rank() ? group.world_size() : peer);
  }
};

class ServeOp : public AnswerOp {
 public:
  explicit ServeOp(OpKernelConstruction* ctx) : AnswerOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("replies", &replies_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bound", &bound_));
  }

 protected:
  bool Compute(OpKernelContext* ctx, const std::shared_ptr<ProcessGroup>& group,
               const DoneCallback& done) override {
    auto call = std::make_shared<ServeCall>();
    call->peer = Peer(ctx, *group);
    call->queue = QueueOfPeer(*group, call->peer);
    call->replies = replies_;
    call->bound = bound_;
    call->operation =
        std::make_shared<Operation>(group, Kind::kRequest, call->queue, label_);
    call->operation->background = true;
    switch (group->requests().Attach(
        call->queue, tag_, {ctx, done, Scalar(ctx, 1)}, call->operation)) {
      case RequestState::Attached::kStopped:
        ServeCall::SetOutputs(ctx, Tensor(tensorflow::DT_UINT8, {0}), kStopped);
        return false;
      case RequestState::Attached::kWaits:
        return true;
      case RequestState::Attached::kNew:
        break;
    }
    group->Run(
        call->operation, true, [call] { call->Post(); },
        [call] { call->Run(); },
        [call](const absl::Status& status) { call->Finish(status); });
    return true;
  }

 private:
  bool replies_ = true;
  int64_t bound_ = -1;
};

class ReplyOp : public AnswerOp {
 public:
  using AnswerOp::AnswerOp;

 protected:
  bool Compute(OpKernelContext* ctx, const std::shared_ptr<ProcessGroup>& group,
               const DoneCallback& done) override {
    const int64_t queue = QueueOfPeer(*group, Peer(ctx, *group));
    group->requests().Unlock(queue);
    const std::shared_ptr<Served> served = group->requests().TakeServed(queue);
    const Tensor& error = ctx->input(2);
    if (served == nullptr) return false;  // the request has ended
    {
      std::lock_guard<std::mutex> lock(served->mutex);
      if (served->replied) return false;  // the operation has failed
      served->replied = true;
      served->reply = ctx->input(1);
      if (error.NumElements() == 1) {
        served->error = std::string(error.flat<tensorflow::tstring>()(0));
      }
      served->sent = done;
    }
    served->operation->Advance();
    return true;
  }
};

class SetHandlerOp : public AnswerOp {
 public:
  using AnswerOp::AnswerOp;

 protected:
  bool Compute(OpKernelContext* ctx, const std::shared_ptr<ProcessGroup>& group,
               const DoneCallback&) override {
    for (const Server& server :
         group->requests().SetHandler(tag_, Scalar(ctx, 0))) {
      ServeCall::SetOutputs(server.ctx, Tensor(tensorflow::DT_UINT8, {0}),
                            kStopped);
      server.done();
    }
    return false;
  }
};

class SetClockOp : public AnswerOp {
 public:
  using AnswerOp::AnswerOp;

 protected:
  bool Compute(OpKernelContext* ctx, const std::shared_ptr<ProcessGroup>& group,
               const DoneCallback&) override {
    group->requests().SetClock(Peer(ctx, *group), Scalar(ctx, 1));
    return false;
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Serve").Device(tensorflow::DEVICE_CPU),
                        ServeOp);
REGISTER_KERNEL_BUILDER(Name("Tfdist>Reply").Device(tensorflow::DEVICE_CPU),
                        ReplyOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>SetHandler").Device(tensorflow::DEVICE_CPU), SetHandlerOp);
REGISTER_KERNEL_BUILDER(Name("Tfdist>SetClock").Device(tensorflow::DEVICE_CPU),
                        SetClockOp);

}  // namespace
}  // namespace tfdist
