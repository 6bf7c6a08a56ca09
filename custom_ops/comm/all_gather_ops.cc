// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <vector>

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

REGISTER_OP("Tfdist>AllGather")
    .Input("input: T")
    .Output("output: T")
    .Output("splits: int64")
    .TFDIST_COLLECTIVE_ATTRS
    .Attr("T: {uint8, int32, int64, float, double, bfloat16, half}")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle input, output;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &input));
      TF_RETURN_IF_ERROR(c->ReplaceDim(input, 0, c->UnknownDim(), &output));
      c->set_output(0, output);
      c->set_output(1, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Concatenates the rows of all ranks. Ranks may have different numbers of rows.

input: [n, ...], rows of this rank.
output: [sum of n, ...], rows of all ranks, ordered by rank.
splits: [ranks], number of rows of each rank.
)doc");

namespace {

struct AllGatherCall {
  OpKernelContext* ctx;
  std::shared_ptr<Operation> operation;
  std::unique_ptr<Exchange> exchange;
  uint64_t row_bytes = 0;

  void Post() {
    const Tensor& input = ctx->input(0);
    exchange->ExpectAll();
    for (int step = 1; step < operation->group->world_size(); ++step) {
      exchange->SendRows(operation->group->PeerAfter(step), input.data(),
                         input.dims() < 1 ? 0 : input.dim_size(0));
    }
  }

  void Run() {
    exchange->AwaitHeaders();
    const int world_size = operation->group->world_size();
    const int rank = operation->group->rank();
    const Tensor& input = ctx->input(0);
    Tensor* splits = nullptr;
    CheckOk(AllocateOutput(ctx, 1, {world_size}, &splits));
    auto rows = splits->vec<int64_t>();
    int64_t total = 0;
    for (int peer = 0; peer < world_size; ++peer) {
      rows(peer) =
          peer == rank ? input.dim_size(0) : exchange->header(peer).rows;
      total += rows(peer);
    }
    tensorflow::TensorShape shape = input.shape();
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
    if (input.TotalBytes() > 0) {
      std::memcpy(own_place, input.data(), input.TotalBytes());
    }
    exchange->AwaitPayloads();
    exchange->AwaitSent();
  }
};

class AllGatherOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<AllGatherCall>();
    call->ctx = ctx;
    call->operation = NewOperation(ctx, Kind::kAllGather);
    if (call->operation == nullptr) return done();
    const Tensor& input = ctx->input(0);
    Header header;
    header.dtype = input.dtype();
    SetRowShape(header, input.shape());
    header.agreed = call->row_bytes = RowBytes(input);
    call->exchange = std::make_unique<Exchange>(*call->operation, header);
    if (input.dims() < 1) {
      call->exchange->SetError("input must have at least one dimension");
    }
    call->operation->Keep(input);
    const int peers = call->operation->group->world_size() - 1;
    const bool small = input.TotalBytes() * peers <= kPostInline;
    Start(ctx, std::move(call), small, std::move(done));
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>AllGather").Device(tensorflow::DEVICE_CPU),
                        AllGatherOp);

}  // namespace
}  // namespace tfdist
