// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <vector>

#include "custom_ops/comm/collective_op.h"
#include "custom_ops/comm/process_group.h"
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
    .Output("calls: int64")
    .Output("times: int64")
    .Output("bytes: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(c->UnknownDim()));
      c->set_output(2, c->Matrix(c->UnknownDim(), 2));
      c->set_output(3, c->Matrix(c->UnknownDim(), 2));
      c->set_output(4, c->UnknownShapeOfRank(3));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Starts or stops tracing of a group. Returns and clears the recorded operations.

labels: [operations], labels of the completed operations, in order of their end.
kinds: [operations], such as "all_to_all".
calls: [operations, 2], tag of each operation, and number of earlier calls with
  this tag.
times: [operations, 2], start and end in nanoseconds of the host's steady clock.
bytes: [operations, 2, ranks], bytes sent to each rank and received from each.
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
    const int64_t ranks = group == nullptr ? 0 : group->world_size();
    Tensor* outputs[5];
    const TensorShape shapes[5] = {
        {size}, {size}, {size, 2}, {size, 2}, {size, 2, ranks}};
    for (int i = 0; i < 5; ++i) {
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, shapes[i], &outputs[i]));
    }
    auto calls = outputs[2]->matrix<int64_t>();
    auto times = outputs[3]->matrix<int64_t>();
    auto bytes = outputs[4]->tensor<int64_t, 3>();
    for (int64_t i = 0; i < size; ++i) {
      const TracedOperation& each = traced[i];
      outputs[0]->vec<tstring>()(i) = each.label;
      outputs[1]->vec<tstring>()(i) = KindName(each.kind);
      calls(i, 0) = each.tag;
      calls(i, 1) = each.call;
      times(i, 0) = each.start;
      times(i, 1) = each.end;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        bytes(i, 0, rank) = each.sent_to[rank];
        bytes(i, 1, rank) = each.received_from[rank];
      }
    }
  }
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>GroupTrace").Device(tensorflow::DEVICE_CPU), GroupTraceOp);

}  // namespace tfdist
