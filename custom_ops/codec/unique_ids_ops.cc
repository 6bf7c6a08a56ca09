// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/unique_rows.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Tfdist>UniqueIds")
    .Input("ids: int64")
    .Output("unique: int64")
    .Output("positions: int64")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle ids;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &ids));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, ids);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Finds the unique ids of a batch.

ids: [n].
unique: [u], unique ids, ascending.
positions: [n], such that ids[i] = unique[positions[i]].
)doc");

class UniqueIdsOp : public OpKernel {
 public:
  explicit UniqueIdsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& ids = ctx->input(0);
    const int64_t count = ids.NumElements();
    OP_REQUIRES(ctx, ids.dims() == 1 && count <= UniqueRows::kMostRows,
                InvalidArgument("ids must be a vector of less than 2^32 "
                                "elements. Received shape: ",
                                ids.shape().DebugString()));
    Tensor* positions = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, ids.shape(), &positions));
    const UniqueRows found(ids.vec<int64_t>().data(), count,
                           positions->vec<int64_t>().data());
    Tensor* unique = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {found.size()}, &unique));
    std::copy_n(found.rows(), found.size(), unique->vec<int64_t>().data());
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>UniqueIds").Device(tensorflow::DEVICE_CPU),
                        UniqueIdsOp);

}  // namespace
}  // namespace tfdist
