// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "id_lists.h"
#include "lookup_functor.h"
#include "parallel_segments.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
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
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// [samples, width of the table], as far as they are known.
absl::Status LookupShape(InferenceContext* c) {
  ShapeHandle row_splits;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &row_splits));
  DimensionHandle samples;
  TF_RETURN_IF_ERROR(c->Subtract(c->Dim(row_splits, 0), 1, &samples));
  tensorflow::PartialTensorShape table_shape;
  TF_RETURN_IF_ERROR(c->GetAttr("table_shape", &table_shape));
  ShapeHandle table;
  TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(table_shape, &table));
  TF_RETURN_IF_ERROR(c->WithRank(table, 2, &table));
  c->set_output(0, c->Matrix(samples, c->Dim(table, 1)));
  return absl::OkStatus();
}

REGISTER_OP("Tfdist>Lookup")
    .Input("table: resource")
    .Input("row_splits: int64")
    .Input("rows: int64")
    .Input("weights: float")
    .Output("output: T")
    .Attr("T: {float} = DT_FLOAT")
    .Attr("table_shape: shape")
    .Attr("shard: string = ''")
    // It reads what other ops write: never folded, merged or hoisted.
    .SetIsStateful()
    .SetShapeFn(LookupShape)
    .Doc(R"doc(
Sums rows of a table per sample: the pooled lookup.

table: the variable [rows, d] that holds the shard; it is not copied.
row_splits: [S + 1], offsets of the samples in rows.
rows: [n], rows of the table; an error if outside of it.
weights: [n], or [0] when all weights are 1.
output: [S, d], sum over the sample's entries of weight * row; 0 without any.
table_shape: [rows, d], also for the gradient.
shard: what the shard is, for the gradient (see embedding_ops.lookup).
)doc");

// Checks the offsets and weights of `rows`, and that rows are below `limit`.
absl::Status CheckRows(const Tensor& row_splits, const Tensor& rows,
                       const Tensor& weights, int64_t limit) {
  TF_RETURN_IF_ERROR(
      CheckIdList(0, rows, row_splits, weights, row_splits.NumElements() - 1));
  const auto* data = static_cast<const int64_t*>(rows.data());
  const int64_t count = rows.NumElements();
  uint64_t highest = 0;  // negative rows become the highest
  for (int64_t i = 0; i < count; ++i) {
    highest = std::max(highest, static_cast<uint64_t>(data[i]));
  }
  if (count > 0 && highest >= static_cast<uint64_t>(limit)) {
    return InvalidArgument("Row ", static_cast<int64_t>(highest),
                           " is out of range: the table has ", limit, " rows");
  }
  return absl::OkStatus();
}

const float* WeightsOrNull(const Tensor& weights) {
  return weights.NumElements() == 0 ? nullptr
                                    : static_cast<const float*>(weights.data());
}

class LookupOp : public OpKernel {
 public:
  explicit LookupOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(ctx,
                   tensorflow::LookupResource(
                       ctx, tensorflow::HandleFromInput(ctx, 0), &variable));
    // Held while reading: an update of the rows must not interleave.
    tensorflow::tf_shared_lock lock(*variable->mu());
    const Tensor& table = *variable->tensor();
    OP_REQUIRES(ctx, table.dtype() == tensorflow::DT_FLOAT && table.dims() == 2,
                InvalidArgument("The table must be a float matrix. Received: ",
                                table.DebugString(0)));
    const Tensor& row_splits = ctx->input(1);
    const Tensor& rows = ctx->input(2);
    const Tensor& weights = ctx->input(3);
    OP_REQUIRES_OK(ctx,
                   CheckRows(row_splits, rows, weights, table.dim_size(0)));
    const int64_t samples = row_splits.NumElements() - 1;
    Tensor* output = nullptr;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({samples, table.dim_size(1)}),
                                  &output));
    const SegmentSum args = {static_cast<const float*>(table.data()),
                             table.dim_size(1),
                             static_cast<const int64_t*>(row_splits.data()),
                             static_cast<const int64_t*>(rows.data()),
                             WeightsOrNull(weights),
                             static_cast<float*>(output->data())};
    ParallelSegmentSum(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                       args, samples);
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Lookup")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<float>("T"),
                        LookupOp);

}  // namespace
}  // namespace tfdist
