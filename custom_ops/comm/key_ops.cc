// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>

#include "custom_ops/comm/collective_op.h"
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

REGISTER_OP("Tfdist>GroupInsertKey")
    .Input("group: int64")
    .Input("key: string")
    .Input("value: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Sets the value of a key on all ranks, unless the key has a value.");

REGISTER_OP("Tfdist>GroupAwaitKey")
    .Input("group: int64")
    .Input("key: string")
    .Output("value: string")
    .Attr("timeout: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "Waits until a key has a value, and returns it. timeout: limit in "
        "seconds, 0 for no limit.");

namespace {

// Returns a scalar string input. Returns nothing, and sets the status of the
// context, if the input is not a scalar.
std::optional<std::string> TextOf(OpKernelContext* ctx, int input) {
  const Tensor& text = ctx->input(input);
  if (text.NumElements() == 1) return std::string(text.flat<tstring>()(0));
  ctx->SetStatus(tensorflow::errors::InvalidArgument(
      "key and value must be scalars, received ", text.shape().DebugString()));
  return std::nullopt;
}

class GroupInsertKeyOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::shared_ptr<ProcessGroup> group = GroupOf(ctx);
    if (group == nullptr) return;
    const auto key = TextOf(ctx, 1), value = TextOf(ctx, 2);
    if (key && value) OP_REQUIRES_OK(ctx, group->InsertKey(*key, *value));
  }
};

class GroupAwaitKeyOp : public OpKernel {
 public:
  explicit GroupAwaitKeyOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("timeout", &timeout_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::shared_ptr<ProcessGroup> group = GroupOf(ctx);
    if (group == nullptr) return;
    const auto key = TextOf(ctx, 1);
    if (!key) return;
    const absl::StatusOr<std::string> value = group->AwaitKey(*key, timeout_);
    OP_REQUIRES_OK(ctx, value.status());
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &output));
    output->scalar<tstring>()() = *value;
  }

 private:
  float timeout_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>GroupInsertKey").Device(tensorflow::DEVICE_CPU),
    GroupInsertKeyOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>GroupAwaitKey").Device(tensorflow::DEVICE_CPU),
    GroupAwaitKeyOp);

}  // namespace
}  // namespace tfdist
