// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <vector>

#include "custom_ops/collective/collective_op.h"
#include "custom_ops/collective/process_group.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>GroupTrace")
    .Input("group: int64")
    .Input("on: bool")
    .Output("labels: string")
    .Output("kinds: string")
    .Output("numbers: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(c->UnknownDim()));
      c->set_output(2, c->Matrix(c->UnknownDim(), 4));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Notes every operation of a group from now on, or no more, and takes the notes.

labels: of the operations that have ended since, in order.
kinds: all_to_all and so on.
numbers: [operations, 4]: start and end in nanoseconds of the host's steady
  clock, bytes sent and bytes received.
)doc");

class GroupTraceOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const int64_t handle = ctx->input(0).scalar<int64_t>()();
    const std::shared_ptr<ProcessGroup> group = FindGroup(handle);
    std::vector<TracedOperation> traced;
    if (group != nullptr) traced = group->Trace(ctx->input(1).scalar<bool>()());
    const int64_t size = static_cast<int64_t>(traced.size());
    Tensor* outputs[3];
    const TensorShape shapes[3] = {{size}, {size}, {size, 4}};
    for (int i = 0; i < 3; ++i) {
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, shapes[i], &outputs[i]));
    }
    auto numbers = outputs[2]->matrix<int64_t>();
    for (int64_t i = 0; i < size; ++i) {
      const TracedOperation& each = traced[i];
      outputs[0]->vec<tstring>()(i) = each.label;
      outputs[1]->vec<tstring>()(i) = KindName(each.kind);
      numbers(i, 0) = each.start;
      numbers(i, 1) = each.end;
      numbers(i, 2) = each.bytes_sent;
      numbers(i, 3) = each.bytes_received;
    }
  }
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>GroupTrace").Device(tensorflow::DEVICE_CPU), GroupTraceOp);

}  // namespace tfdist
