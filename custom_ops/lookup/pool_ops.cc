// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/lookup/parallel_segments.h"
#include "custom_ops/lookup/pool_kernel.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Tfdist>Pool")
    .Input("matrix: float")
    .Input("row_splits: int64")
    .Input("positions: int64")
    .Input("weights: float")
    .Output("pooled: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle matrix;
      ShapeHandle row_splits;
      DimensionHandle samples;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &matrix));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &row_splits));
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(row_splits, 0), 1, &samples));
      c->set_output(0, c->Matrix(samples, c->Dim(matrix, 1)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sums rows of a matrix per sample: Lookup where the table is a tensor.

matrix: [u, d], a batch's unique rows.
row_splits: [b + 1], offsets of the samples in positions.
positions: [n], rows of the matrix; an error if outside of it.
weights: [n], or [0] when all weights are 1.
pooled: [b, d], sum over the sample's entries of weight * row.
)doc");

REGISTER_OP("Tfdist>PoolGrad")
    .Input("rows: int64")
    .Input("row_splits: int64")
    .Input("positions: int64")
    .Input("weights: float")
    .Input("grad: float")
    .Output("matrix_grad: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle grad;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 2, &grad));
      c->set_output(0, c->Matrix(c->UnknownDim(), c->Dim(grad, 1)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The gradient of Pool with respect to its matrix, a dense one.

A row's summands are added in the order of the samples, so that the bits do not
depend on the number of threads.

rows: scalar, u.
row_splits: [b + 1], as given to Pool.
positions: [n], as given to Pool.
weights: [n] or [0], as given to Pool.
grad: [b, d], the gradient of Pool's result.
matrix_grad: [u, d]; zeros for a row that no sample asked for.
)doc");

struct SumsOnCpu {
  static absl::Status Sum(OpKernelContext* ctx, const SegmentSum& sum,
                          int64_t table_rows, int64_t segments) {
    ParallelSegmentSums(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                        {{sum, segments}},
                        [](size_t, int64_t, int64_t) { return true; });
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Pool").Device(tensorflow::DEVICE_CPU),
                        PoolKernel<SumsOnCpu>);
REGISTER_KERNEL_BUILDER(Name("Tfdist>PoolGrad").Device(tensorflow::DEVICE_CPU),
                        PoolGradKernel<SumsOnCpu>);

}  // namespace
}  // namespace tfdist
