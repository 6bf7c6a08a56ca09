// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <new>
#include <vector>

#include "custom_ops/comm/all_reduce.h"
#include "custom_ops/comm/all_reduce_inputs.h"
#include "custom_ops/comm/collective_op.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>AllReduce")
    .Input("inputs: N * T")
    .Input("weight: float")
    .Output("outputs: N * T")
    .TFDIST_COLLECTIVE_ATTRS.Attr("weighted: bool = false")
    .Attr("unweighted: int >= 0 = 0")
    .Attr("N: int >= 1")
    .Attr("T: {int32, int64, float, double, bfloat16, half}")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sums each input over all ranks, all inputs in one exchange.

inputs: tensors of the same shapes on all ranks.
weight: scalar, read only if `weighted`.
outputs: sums, bitwise equal on all ranks. If `weighted`, they are
  world_size * sum(weight * input) / sum(weight), or zeros if all weights are 0.
  Inputs of a rank with weight 0 are ignored, even if they contain NaN.
unweighted: number of the last inputs that are summed without weights.
)doc");

namespace {

struct AllReduceCall {
  OpKernelContext* ctx;
  std::shared_ptr<Operation> operation;
  AllReduce::Options options;
  std::string error;
  std::vector<Tensor*> outputs;
  std::unique_ptr<AllReduce> reduce;

  void Post() { reduce->Post(); }

  void Run() {
    reduce->Run();
    if (outputs.size() > 1) Unpack();
  }

  // Packs several tensors into scratch memory, where they are summed in place
  // as one tensor. They are unpacked afterwards.
  void Pack(size_t bytes) {
    std::shared_ptr<uint8_t> memory =
        operation->group->scratch().Acquire(bytes);
    operation->Keep(memory);
    options.input = options.output = memory.get();
    uint8_t* place = memory.get();
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Tensor& input = ctx->input(static_cast<int>(i));
      if (input.TotalBytes() == 0) continue;
      std::memcpy(place, input.data(), input.TotalBytes());
      place += input.TotalBytes();
    }
  }

  void Unpack() const {
    const uint8_t* place = static_cast<const uint8_t*>(options.output);
    for (Tensor* output : outputs) {
      if (output->TotalBytes() == 0) continue;
      std::memcpy(output->data(), place, output->TotalBytes());
      place += output->TotalBytes();
    }
  }
};

class AllReduceOp : public CollectiveOp {
 public:
  explicit AllReduceOp(tensorflow::OpKernelConstruction* ctx)
      : CollectiveOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("weighted", &weighted_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("unweighted", &unweighted_));
    tensorflow::DataType dtype;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype));
    OP_REQUIRES(ctx, !weighted_ || !tensorflow::DataTypeIsInteger(dtype),
                tensorflow::errors::InvalidArgument(
                    "a weighted all_reduce needs a floating dtype, received ",
                    tensorflow::DataTypeString(dtype)));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<AllReduceCall>();
    call->ctx = ctx;
    call->operation = NewOperation(ctx, Kind::kAllReduce);
    if (call->operation == nullptr) return done();
    OP_REQUIRES_OK_ASYNC(ctx, Prepare(ctx, *call), done);
    const bool post_inline = call->reduce->posts_inline();
    Start(ctx, std::move(call), post_inline, std::move(done));
  }

 private:
  absl::Status Prepare(OpKernelContext* ctx, AllReduceCall& call) {
    const int count = ctx->num_inputs() - 1;
    size_t bytes = 0;
    call.outputs.resize(count);
    for (int i = 0; i < count; ++i) {
      const Tensor& input = ctx->input(i);
      bytes += input.TotalBytes();
      TF_RETURN_IF_ERROR(ctx->forward_input_or_allocate_output(
          {i}, i, input.shape(), &call.outputs[i]));
    }
    AllReduce::Options& options = call.options;
    DescribeInputs(ctx, unweighted_, options);
    options.weighted = weighted_;
    if (weighted_) call.error = ReadWeight(ctx->input(count), options);
    if (count == 1) {
      options.input = ctx->input(0).data();
      options.output = call.outputs[0]->data();
      call.operation->Keep(ctx->input(0));
      call.operation->Keep(*call.outputs[0]);
    } else {
      try {
        call.Pack(bytes);
      } catch (const std::bad_alloc&) {
        return absl::ResourceExhaustedError(
            Message(call.operation->Name(), ": no memory for ", bytes,
                    " bytes that travel together"));
      }
    }
    call.reduce = std::make_unique<AllReduce>(*call.operation, options);
    if (!call.error.empty()) call.reduce->SetError(call.error);
    return absl::OkStatus();
  }

  bool weighted_ = false;
  int unweighted_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>AllReduce").Device(tensorflow::DEVICE_CPU),
                        AllReduceOp);

}  // namespace
}  // namespace tfdist
