// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/comm/collective_op.h"
#include "custom_ops/comm/exchange.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>GroupOpen")
    .Input("addresses: string")
    .Input("sockets: int32")
    .Input("shared: int32")
    .Output("group: int64")
    .Attr("rank: int >= 0")
    .Attr("timeout: float")
    .Attr("most_early: int >= 1")
    .Attr("all_reduce: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Creates a process group from connections to all other ranks.

addresses: [ranks], "host:port" of each rank, for error messages.
sockets: [ranks, 2], file descriptors of two connections to each rank, one for
  messages and one for control. The row of this rank is ignored. The group owns
  the descriptors.
shared: [ranks, 2], file descriptors for each rank with which this rank shares
  memory: the memory, and one end of a pair of Unix sockets by which the two
  ranks wake each other. -1 for other ranks.
group: scalar, handle of the group.
rank: number of this rank.
timeout: limit of the wait of an operation, in seconds.
most_early: limit of bytes that a peer may send before this rank expects them.
all_reduce: "direct", "ring" or "tree" selects the algorithm of all all_reduces.
  If empty, it is selected by size.
)doc");

REGISTER_OP("Tfdist>GroupClose")
    .Input("group: int64")
    .Input("error: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Closes the group and notifies the peers. Closing it again has no effect.

group: handle of the group.
error: scalar, the error that ended the program, which the peers report. Empty
  if the program succeeded.
)doc");

REGISTER_OP("Tfdist>GroupLeave")
    .Input("group: int64")
    .Input("reason: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Leaves the current generation of the group, and tells the peers why.

Operations that wait for this rank fail at once, on every rank. The ranks
continue together in the next generation, after each of them has left this one.

group: handle of the group.
reason: scalar, the error of this rank. If a peer has left this generation
  before, its reason is used instead.
)doc");

REGISTER_OP("Tfdist>GroupLeaves")
    .Input("group: int64")
    .Input("leaves: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Sets whether the caller calls GroupLeave if its current work fails.

If an op of a step fails while an exchange of this step waits, the exchange ends
with an error. If `leaves` is false, the group fails too, because its ranks
would no longer run the same operations.

group: handle of the group.
leaves: scalar.
)doc");

REGISTER_OP("Tfdist>GroupLeft")
    .Input("group: int64")
    .Output("reason: string")
    .Output("told: bool")
    .Output("generation: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns why a peer has left the current generation of this rank.

group: handle of the group.
reason: scalar, the error of the peer; empty if no peer has left.
told: scalar, whether an operation of this rank has failed with that error.
generation: scalar, number of the current generation.
)doc");

REGISTER_OP("Tfdist>GroupStats")
    .Input("group: int64")
    .Output("counters: int64")
    .Output("labels: string")
    .Output("label_calls: int64")
    .Output("label_bytes: int64")
    .Output("label_seconds: double")
    .Output("waited: double")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(6));
      for (int i = 1; i < 6; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns counters of the group since it was opened.

counters: [6], bytes sent, bytes received, messages sent, messages received,
  calls, and system calls that sent messages.
labels: [labels], labels of the operations.
label_calls: [labels], calls of each label.
label_bytes: [labels], bytes sent by each label.
label_seconds: [labels], total time from start to end of the operations of each
  label.
waited: [ranks], seconds that operations waited for peers, by the rank that
  arrived last.
)doc");

REGISTER_OP("Tfdist>CheckPlan")
    .Input("entries: string")
    .TFDIST_COLLECTIVE_ATTRS.SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(
        "Compares the entries of all ranks. Fails on all ranks if they "
        "differ.");

namespace {

class GroupOpenOp : public OpKernel {
 public:
  explicit GroupOpenOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int64_t rank = 0;
    float timeout = 0;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rank", &rank));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("timeout", &timeout));
    OP_REQUIRES(ctx, std::isfinite(timeout) && timeout > 0,
                tensorflow::errors::InvalidArgument(
                    "timeout must be positive, received ", timeout));
    int64_t most_early = 0;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("most_early", &most_early));
    options_.most_early = static_cast<uint64_t>(most_early);
    std::string form;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("all_reduce", &form));
    options_.all_reduce = FindForm(form);
    OP_REQUIRES(
        ctx, form.empty() || options_.all_reduce.has_value(),
        tensorflow::errors::InvalidArgument(
            "all_reduce must be direct, ring or tree, received ", form));
    options_.rank = static_cast<int>(rank);
    options_.timeout = timeout;
  }

  void Compute(OpKernelContext* ctx) override {
    // Take ownership of all descriptors before anything can fail.
    std::vector<FileDescriptor> sockets = Own(ctx->input(1));
    std::vector<FileDescriptor> shared = Own(ctx->input(2));
    GroupOptions options = options_;
    const auto addresses = ctx->input(0).flat<tstring>();
    for (int64_t i = 0; i < addresses.size(); ++i) {
      options.addresses.emplace_back(addresses(i));
    }
    options.world_size = static_cast<int>(options.addresses.size());
    OP_REQUIRES(ctx,
                options.world_size > 1 && options.rank < options.world_size,
                tensorflow::errors::InvalidArgument(
                    "a group needs two ranks or more and a rank below their "
                    "number, received rank ",
                    options.rank, " of ", options.world_size));
    const size_t size = options.addresses.size();
    OP_REQUIRES(ctx, sockets.size() == 2 * size,
                tensorflow::errors::InvalidArgument(
                    "sockets must have shape [", options.world_size,
                    ", 2], received ", ctx->input(1).shape().DebugString()));
    OP_REQUIRES(ctx, shared.size() == 2 * size,
                tensorflow::errors::InvalidArgument(
                    "shared must have shape [", options.world_size,
                    ", 2], received ", ctx->input(2).shape().DebugString()));
    std::vector<Transport::Pair> pairs(size);
    for (int peer = 0; peer < options.world_size; ++peer) {
      if (peer == options.rank) continue;
      OP_REQUIRES(
          ctx, sockets[2 * peer].get() >= 0 && sockets[2 * peer + 1].get() >= 0,
          tensorflow::errors::InvalidArgument(
              "rank ", options.rank, " has no connections to rank ", peer));
      pairs[peer] = {std::move(sockets[2 * peer]),
                     std::move(sockets[2 * peer + 1]),
                     {std::move(shared[2 * peer]),
                      std::move(shared[2 * peer + 1]), options.rank < peer}};
    }
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &handle));
    try {
      auto group = std::make_shared<ProcessGroup>(options, std::move(pairs));
      group->Start();
      handle->scalar<int64_t>()() = RegisterGroup(std::move(group));
    } catch (const BadConnection& error) {
      ctx->SetStatus(absl::UnavailableError(
          Message("rank ", options.rank, " cannot use its connections to rank ",
                  error.peer, " (", options.addresses[error.peer],
                  "), which may have died: ", error.what())));
    } catch (const std::exception& error) {
      ctx->SetStatus(absl::UnavailableError(
          Message("rank ", options.rank,
                  " cannot use its connections: ", error.what())));
    }
  }

 private:
  static std::vector<FileDescriptor> Own(const Tensor& numbers) {
    std::vector<FileDescriptor> owned;
    const auto values = numbers.flat<int32_t>();
    for (int64_t i = 0; i < values.size(); ++i) owned.emplace_back(values(i));
    return owned;
  }

  GroupOptions options_;
};

class GroupCloseOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& handle = ctx->input(0);
    OP_REQUIRES(
        ctx, handle.NumElements() == 1,
        tensorflow::errors::InvalidArgument("group must be a scalar, received ",
                                            handle.shape().DebugString()));
    const Tensor& error = ctx->input(1);
    OP_REQUIRES(
        ctx, error.NumElements() == 1,
        tensorflow::errors::InvalidArgument("error must be a scalar, received ",
                                            error.shape().DebugString()));
    std::shared_ptr<ProcessGroup> group =
        RemoveGroup(handle.flat<int64_t>()(0));
    if (group != nullptr) group->Close(error.flat<tstring>()(0));
  }
};

class GroupLeaveOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::shared_ptr<ProcessGroup> group = GroupOf(ctx);
    if (group == nullptr) return;
    const Tensor& reason = ctx->input(1);
    OP_REQUIRES(ctx, reason.NumElements() == 1,
                tensorflow::errors::InvalidArgument(
                    "reason must be a scalar, received ",
                    reason.shape().DebugString()));
    group->Leave(reason.flat<tstring>()(0));
  }
};

class GroupLeavesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::shared_ptr<ProcessGroup> group = GroupOf(ctx);
    if (group == nullptr) return;
    const Tensor& leaves = ctx->input(1);
    OP_REQUIRES(ctx, leaves.NumElements() == 1,
                tensorflow::errors::InvalidArgument(
                    "leaves must be a scalar, received ",
                    leaves.shape().DebugString()));
    group->SetLeaves(leaves.flat<bool>()(0));
  }
};

class GroupLeftOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::shared_ptr<ProcessGroup> group = GroupOf(ctx);
    if (group == nullptr) return;
    Tensor* reason = nullptr;
    Tensor* told = nullptr;
    Tensor* generation = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &reason));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({}), &told));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({}), &generation));
    const auto [because, known] = group->LeaveReason();
    reason->scalar<tstring>()() = because;
    told->scalar<bool>()() = known;
    generation->scalar<int64_t>()() = group->generation();
  }
};

class GroupStatsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::shared_ptr<ProcessGroup> group = GroupOf(ctx);
    if (group == nullptr) return;
    const GroupStats stats = group->Stats();
    const int64_t size = static_cast<int64_t>(stats.labels.size());
    const int64_t ranks = group->world_size();
    const int64_t sizes[6] = {6, size, size, size, size, ranks};
    Tensor* outputs[6];
    for (int i = 0; i < 6; ++i) {
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, {sizes[i]}, &outputs[i]));
    }
    auto counters = outputs[0]->vec<int64_t>();
    counters(0) = stats.bytes_sent;
    counters(1) = stats.bytes_received;
    counters(2) = stats.messages_sent;
    counters(3) = stats.messages_received;
    counters(4) = stats.calls;
    counters(5) = stats.writes;
    int64_t i = 0;
    for (const auto& [label, value] : stats.labels) {
      outputs[1]->vec<tstring>()(i) = label;
      outputs[2]->vec<int64_t>()(i) = value.calls;
      outputs[3]->vec<int64_t>()(i) = value.bytes;
      outputs[4]->vec<double>()(i) = value.seconds;
      ++i;
    }
    for (int64_t rank = 0; rank < ranks; ++rank) {
      outputs[5]->vec<double>()(rank) = stats.waited[rank];
    }
  }
};

struct CheckPlanCall {
  std::shared_ptr<Operation> operation;
  std::unique_ptr<Exchange> exchange;
  std::string plan;  // each entry with its terminating zero byte

  void Post() {
    exchange->ExpectAll();
    exchange->SendToAll(plan.data(), plan.size());
  }

  void Run() {
    exchange->AwaitHeaders();
    const int world_size = operation->group->world_size();
    std::vector<std::string> plans(world_size);
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer == operation->group->rank()) {
        plans[peer] = plan;
        continue;
      }
      plans[peer].resize(exchange->header(peer).bytes);
      exchange->ReceiveInto(peer, plans[peer].data());
    }
    exchange->AwaitPayloads();
    exchange->AwaitSent();
    std::string differences;
    for (int peer = 1; peer < world_size; ++peer) {
      if (plans[peer] != plans[0]) differences += Difference(plans, peer);
    }
    if (differences.empty()) return;
    throw OperationError(absl::InvalidArgumentError(Message(
                             "rank ", operation->group->rank(),
                             ": the ranks have different plans.", differences)),
                         false);
  }

  std::string Difference(const std::vector<std::string>& plans,
                         int peer) const {
    const std::vector<std::string> ours = Split(plans[0]);
    const std::vector<std::string> theirs = Split(plans[peer]);
    size_t i = 0;
    while (i < ours.size() && i < theirs.size() && ours[i] == theirs[i]) ++i;
    const auto entry = [i](const std::vector<std::string>& entries) {
      return i < entries.size() ? "'" + entries[i] + "'"
                                : std::string("no such entry");
    };
    const ProcessGroup& group = *operation->group;
    return Message(" Entry ", i, ": ", group.RankName(0), " has ", entry(ours),
                   ", ", group.RankName(peer), " has ", entry(theirs), ".");
  }

  static std::vector<std::string> Split(const std::string& plan) {
    std::vector<std::string> entries;
    for (size_t begin = 0; begin < plan.size();) {
      const size_t end = std::min(plan.find('\0', begin), plan.size());
      entries.push_back(plan.substr(begin, end - begin));
      begin = end + 1;
    }
    return entries;
  }
};

class CheckPlanOp : public CollectiveOp {
 public:
  explicit CheckPlanOp(OpKernelConstruction* ctx) : CollectiveOp(ctx) {
    tag_ = kPlanTag;
    label_ = "plan";
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<CheckPlanCall>();
    call->operation = NewOperation(ctx, Kind::kCheckPlan);
    if (call->operation == nullptr) return done();
    const auto entries = ctx->input(0).flat<tstring>();
    for (int64_t i = 0; i < entries.size(); ++i) {
      call->plan.append(entries(i).data(), entries(i).size());
      call->plan.push_back('\0');
    }
    call->exchange = std::make_unique<Exchange>(*call->operation, Header());
    Start(ctx, std::move(call), true, std::move(done));
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>GroupOpen").Device(tensorflow::DEVICE_CPU),
                        GroupOpenOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>GroupClose").Device(tensorflow::DEVICE_CPU), GroupCloseOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>GroupLeave").Device(tensorflow::DEVICE_CPU), GroupLeaveOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>GroupLeaves").Device(tensorflow::DEVICE_CPU), GroupLeavesOp);
REGISTER_KERNEL_BUILDER(Name("Tfdist>GroupLeft").Device(tensorflow::DEVICE_CPU),
                        GroupLeftOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>GroupStats").Device(tensorflow::DEVICE_CPU), GroupStatsOp);
REGISTER_KERNEL_BUILDER(Name("Tfdist>CheckPlan").Device(tensorflow::DEVICE_CPU),
                        CheckPlanOp);

}  // namespace
}  // namespace tfdist
