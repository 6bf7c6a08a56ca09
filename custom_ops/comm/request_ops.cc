// SPDX-License-Identifier: Apache-2.0
// Requests of one rank to all others, which answer them at any time.
//
// In a collective, all ranks run the same operation. A request is different: a
// rank sends a message to every rank, also to itself, and each of them serves
// the message while it runs something else. Served messages of a peer come in
// the order of its requests.
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/comm/collective_op.h"
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

REGISTER_OP("Tfdist>Serve")
    .Output("payload: uint8")
    .Output("step: int64")
    .TFDIST_COLLECTIVE_ATTRS.Attr("peer: int >= 0")
    .Attr("replies: bool")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Waits, without a limit, for the next message of `peer` in a Request of this tag.

payload: [bytes], the message, or the reason why there is none.
step: scalar, the number that was sent with the message. -1 if a rank has left
  the generation, -2 if the group has failed or is closed.
replies: whether the request has replies. A Reply must then follow.
)doc");

REGISTER_OP("Tfdist>Reply")
    .Input("values: T")
    .Input("error: string")
    .TFDIST_COLLECTIVE_ATTRS.Attr("peer: int >= 0")
    .Attr("T: {uint8, float, bfloat16, half}")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Answers the message that the last Serve of the tag and peer has returned.

The op does not fail if the request has ended meanwhile.

values: [n], the reply.
error: scalar; if it is not empty, the Request fails with this text.
)doc");

namespace {

// Parts of a request's call.
constexpr uint32_t kMessagePart = 0;
constexpr uint32_t kReplyPart = 1;
// Steps that Serve returns without a message.
constexpr int64_t kLeft = -1;
constexpr int64_t kEnded = -2;

// Every rank sends its requests with a tag of its own: the ranks run different
// numbers of requests. `rank` world_size is the tag by which a rank serves
// itself.
int64_t TagOf(int64_t tag, int rank) {
  const uint64_t mixed =
      (static_cast<uint64_t>(tag) ^
       (0x9E3779B97F4A7C15u * (static_cast<uint64_t>(rank) + 1))) *
      0xBF58476D1CE4E5B9u;
  return static_cast<int64_t>(mixed >> 2);
}

// A message of this rank to itself, and its reply.
struct OwnMessage {
  uint32_t generation = 0;
  Tensor payload;
  int64_t step = 0;
  std::shared_ptr<Operation> request;
  std::mutex mutex;  // guards the members below
  bool replied = false;
  Tensor reply;
  std::string error;

  bool HasReply() {
    std::lock_guard<std::mutex> lock(mutex);
    return replied;
  }
  void SetReply(const Tensor& values, const std::string& text) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      replied = true;
      reply = values;
      error = text;
    }
    request->Advance();
  }
};

// A message that was served and waits for its reply.
struct Served {
  std::shared_ptr<Operation> operation;
  std::mutex mutex;  // guards the members below
  bool replied = false;
  Tensor reply;
  std::string error;
  std::function<void()> sent;

  bool HasReply() {
    std::lock_guard<std::mutex> lock(mutex);
    return replied;
  }
};

using Place = std::pair<const ProcessGroup*, int64_t>;

// Messages of ranks to themselves, and messages that wait for a reply.
class Pending {
 public:
  static Pending& Get() {
    static auto* pending = new Pending;  // threads may use it until the end
    return *pending;
  }

  void Push(const Place& place, std::shared_ptr<OwnMessage> message) {
    std::shared_ptr<Operation> server;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Queue& queue = queues_[place];
      queue.messages.push_back(std::move(message));
      server = queue.server;
    }
    if (server != nullptr) server->Advance();
  }

  void Await(const Place& place, std::shared_ptr<Operation> server) {
    std::lock_guard<std::mutex> lock(mutex_);
    queues_[place].server = std::move(server);
  }

  // Returns null if there is no message of `generation`.
  std::shared_ptr<OwnMessage> Pop(const Place& place, uint32_t generation) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& messages = queues_[place].messages;
    while (!messages.empty()) {
      std::shared_ptr<OwnMessage> first = messages.front();
      if (first->generation > generation) return nullptr;
      messages.pop_front();
      if (first->generation == generation) return first;
    }
    return nullptr;
  }

  void SetServed(const Place& place, std::shared_ptr<Served> served) {
    std::lock_guard<std::mutex> lock(mutex_);
    served_[place] = std::move(served);
  }

  std::shared_ptr<Served> TakeServed(const Place& place) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = served_.find(place);
    if (found == served_.end()) return nullptr;
    std::shared_ptr<Served> served = std::move(found->second);
    served_.erase(found);
    return served;
  }

  // Forgets what is pending for the server of a place.
  void Forget(const Place& place) {
    std::lock_guard<std::mutex> lock(mutex_);
    queues_.erase(place);
    served_.erase(place);
  }

 private:
  struct Queue {
    std::deque<std::shared_ptr<OwnMessage>> messages;
    std::shared_ptr<Operation> server;  // waits for the next message
  };

  std::mutex mutex_;
  std::map<Place, Queue> queues_;
  std::map<Place, std::shared_ptr<Served>> served_;
};

// One request of this rank.
struct RequestCall {
  OpKernelContext* ctx;
  std::shared_ptr<Operation> operation;
  int64_t own_tag = 0;  // see TagOf
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
    Pending::Get().Push({&group(), own_tag}, own);
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
        group, Kind::kRequest, TagOf(tag_, group->rank()), label_);
    call->own_tag = TagOf(tag_, group->world_size());
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

// Serves one message: waits for it, gives it to TensorFlow, and sends the reply
// that a Reply op sets.
struct ServeCall {
  OpKernelContext* ctx;  // valid until `done` is called
  std::function<void()> done;
  std::shared_ptr<Operation> operation;
  int peer = 0;
  Place place;
  bool replies = true;
  Incoming* message = nullptr;
  std::shared_ptr<OwnMessage> own;
  std::shared_ptr<Served> served;

  bool is_own() const { return peer == operation->group->rank(); }

  void Post() {
    if (is_own()) {
      Pending::Get().Await(place, operation);
    } else {
      message = operation->Expect(peer, kMessagePart);
    }
  }

  void Run() {
    is_own() ? TakeOwn() : Receive();
    if (!replies) return Done();
    served = std::make_shared<Served>();
    served->operation = operation;
    Pending::Get().SetServed(place, served);
    Done();
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
          if (own == nullptr) {
            own = Pending::Get().Pop(place, operation->generation);
          }
          return own != nullptr;
        },
        "await request");
    ctx->set_output(0, own->payload);
    SetStep(own->step);
  }

  void Receive() {
    operation->AwaitHeader(peer, message, "await request");
    const int64_t bytes = message->header.bytes;
    Tensor* payload = nullptr;
    CheckOk(ctx->allocate_output(0, TensorShape({bytes}), &payload));
    if (bytes > 0) {
      operation->Give(peer, message, payload->data(), bytes);
      operation->AwaitBytes(peer, message, bytes, "receive request");
    }
    SetStep(message->header.rows);
  }

  void SetStep(int64_t value) const {
    Tensor* step = nullptr;
    CheckOk(ctx->allocate_output(1, TensorShape({}), &step));
    step->scalar<int64_t>()() = value;
  }

  void Done() { std::exchange(done, nullptr)(); }

  // Called once, when the operation has ended. A server that ends is no failure
  // of a step, so the op succeeds and returns the reason.
  void Finish(const absl::Status& status) {
    if (done != nullptr) {
      const auto size = static_cast<int64_t>(status.message().size());
      Tensor reason(tensorflow::DT_UINT8, TensorShape({size}));
      std::memcpy(reason.data(), status.message().data(), size);
      ctx->set_output(0, reason);
      Tensor step(tensorflow::DT_INT64, TensorShape({}));
      step.scalar<int64_t>()() = absl::IsAborted(status) ? kLeft : kEnded;
      ctx->set_output(1, step);
      Done();
    }
    if (served == nullptr) return;
    Pending::Get().TakeServed(place);
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

class ServeOp : public CollectiveOp {
 public:
  explicit ServeOp(OpKernelConstruction* ctx) : CollectiveOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("peer", &peer_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("replies", &replies_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    std::shared_ptr<Operation> checked = NewOperation(ctx, Kind::kRequest);
    if (checked == nullptr) return done();
    auto call = std::make_shared<ServeCall>();
    const std::shared_ptr<ProcessGroup> group = checked->group;
    OP_REQUIRES_ASYNC(ctx, peer_ < group->world_size(),
                      tensorflow::errors::InvalidArgument(
                          "peer must be below the world size ",
                          group->world_size(), ", received ", peer_),
                      done);
    call->ctx = ctx;
    call->done = std::move(done);
    call->peer = static_cast<int>(peer_);
    const int64_t tag = TagOf(
        tag_, call->peer == group->rank() ? group->world_size() : call->peer);
    call->operation =
        std::make_shared<Operation>(group, Kind::kRequest, tag, label_);
    call->operation->background = true;
    call->place = {group.get(), tag};
    call->replies = replies_;
    group->Run(
        call->operation, true, [call] { call->Post(); },
        [call] { call->Run(); },
        [call](const absl::Status& status) { call->Finish(status); });
  }

 private:
  int64_t peer_ = 0;
  bool replies_ = true;
};

class ReplyOp : public CollectiveOp {
 public:
  explicit ReplyOp(OpKernelConstruction* ctx) : CollectiveOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("peer", &peer_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    std::shared_ptr<Operation> checked = NewOperation(ctx, Kind::kRequest);
    if (checked == nullptr) return done();
    const ProcessGroup& group = *checked->group;
    const bool own = peer_ == group.rank();
    const int64_t tag =
        TagOf(tag_, own ? group.world_size() : static_cast<int>(peer_));
    const std::shared_ptr<Served> served =
        Pending::Get().TakeServed({&group, tag});
    const Tensor& error = ctx->input(1);
    if (served == nullptr) return done();  // the request has ended
    bool over = false;
    {
      std::lock_guard<std::mutex> lock(served->mutex);
      over = served->replied;  // the operation has failed
      served->replied = true;
      served->reply = ctx->input(0);
      if (error.NumElements() == 1) {
        served->error = std::string(error.flat<tensorflow::tstring>()(0));
      }
      if (!over) served->sent = done;
    }
    if (over) return done();
    served->operation->Advance();
  }

 private:
  int64_t peer_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>Request").Device(tensorflow::DEVICE_CPU).HostMemory("tables"),
    RequestOp);
REGISTER_KERNEL_BUILDER(Name("Tfdist>Serve").Device(tensorflow::DEVICE_CPU),
                        ServeOp);
REGISTER_KERNEL_BUILDER(Name("Tfdist>Reply").Device(tensorflow::DEVICE_CPU),
                        ReplyOp);

}  // namespace
}  // namespace tfdist
