// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <numeric>
#include <vector>

#include "custom_ops/comm/all_to_all_splits.h"
#include "custom_ops/comm/collective_op.h"
#include "custom_ops/comm/exchange.h"
#include "custom_ops/common/allocate_output.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Tfdist>AllToAll")
    .Input("input: T")
    .Input("send_splits: int64")
    .Output("output: T")
    .Output("recv_splits: int64")
    .TFDIST_COLLECTIVE_ATTRS.Attr("generation: int = -1")
    .Attr("T: {uint8, int32, int64, float, double, bfloat16, half}")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle input, splits, output;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &input));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &splits));
      TF_RETURN_IF_ERROR(c->ReplaceDim(input, 0, c->UnknownDim(), &output));
      c->set_output(0, output);
      c->set_output(1, splits);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sends rows to each rank and receives rows from each rank.

input: [n, ...], rows to send, ordered by receiver.
send_splits: [ranks], number of rows for each rank. Their sum must be n.
output: received rows, ordered by sender.
recv_splits: [ranks], number of rows received from each rank.
generation: -1, or, for an op of a thread that runs beside the program, the
  generation of the group to which it belongs. In a later one it fails with
  ABORTED. Such an op has no deadline.
)doc");

namespace {

struct AllToAllCall {
  OpKernelContext* ctx;
  std::shared_ptr<Operation> operation;
  std::unique_ptr<Exchange> exchange;
  std::vector<int64_t> splits;
  uint64_t row_bytes = 0;

  void Post() {
    exchange->ExpectAll();
    for (int step = 1; step < operation->group->world_size(); ++step) {
      const int peer = operation->group->PeerAfter(step);
      exchange->SendRows(peer, DataFor(peer), splits[peer]);
    }
  }

  void Run() {
    exchange->AwaitHeaders();
    const int world_size = operation->group->world_size();
    const int rank = operation->group->rank();
    Tensor* recv_splits = nullptr;
    CheckOk(AllocateOutput(ctx, 1, {world_size}, &recv_splits));
    auto rows = recv_splits->vec<int64_t>();
    int64_t total = 0;
    for (int peer = 0; peer < world_size; ++peer) {
      rows(peer) = peer == rank ? splits[rank] : exchange->header(peer).rows;
      total += rows(peer);
    }
    tensorflow::TensorShape shape = ctx->input(0).shape();
    CheckOk(shape.SetDimWithStatus(0, total));
    Tensor* output = nullptr;
    CheckOk(ctx->allocate_output(0, shape, &output));
    operation->Keep(*output);
    char* place = static_cast<char*>(output->data());
    char* own_place = nullptr;
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer == rank) own_place = place;
      if (peer != rank) exchange->ReceiveInto(peer, place);
      place += rows(peer) * row_bytes;
    }
    CopyOwn(own_place);  // while the rows of the peers arrive
    exchange->AwaitPayloads();
    exchange->AwaitSent();
  }

  const char* DataFor(int peer) const {
    const char* data = static_cast<const char*>(ctx->input(0).data());
    return data + row_bytes * std::accumulate(splits.begin(),
                                              splits.begin() + peer,
                                              uint64_t{0});
  }

  void CopyOwn(char* place) const {
    const int rank = operation->group->rank();
    const size_t bytes = splits[rank] * row_bytes;
    if (bytes > 0) std::memcpy(place, DataFor(rank), bytes);
  }
};

class AllToAllOp : public CollectiveOp {
 public:
  explicit AllToAllOp(tensorflow::OpKernelConstruction* ctx)
      : CollectiveOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("generation", &generation_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<AllToAllCall>();
    call->ctx = ctx;
    call->operation = NewOperation(ctx, Kind::kAllToAll);
    if (call->operation == nullptr) return done();
    call->operation->only_generation = generation_;
    call->operation->background = generation_ >= 0;
    const Tensor& input = ctx->input(0);
    const std::string error =
        CheckSplits(input, ctx->input(1), call->operation->group->world_size());
    Header header;
    header.dtype = input.dtype();
    SetRowShape(header, input.shape());
    header.agreed = call->row_bytes = RowBytes(input);
    call->exchange = std::make_unique<Exchange>(*call->operation, header);
    if (error.empty()) {
      const auto splits = ctx->input(1).vec<int64_t>();
      call->splits.assign(splits.data(), splits.data() + splits.size());
    } else {
      call->exchange->SetError(error);
      call->splits.assign(call->operation->group->world_size(), 0);
    }
    call->operation->Keep(input);
    const bool small = input.TotalBytes() <= kPostInline;
    Start(ctx, std::move(call), small, std::move(done));
  }

 private:
  int64_t generation_ = -1;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>AllToAll").Device(tensorflow::DEVICE_CPU),
                        AllToAllOp);

}  // namespace
}  // namespace tfdist
