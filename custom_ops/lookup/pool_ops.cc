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
Computes the weighted sum of the rows of each sample, from a tensor of rows.

matrix: [u, d], unique rows of a batch.
row_splits: [b + 1], offsets of the samples in `positions`.
positions: [n], rows of the matrix. The op fails if one is out of range.
weights: [n], or [0] if all weights are 1.
pooled: [b, d], for each sample, the sum of weight * row over its positions.
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
Computes the dense gradient of Pool with respect to its matrix.

The contributions to a row are added in the order of the samples, so that the
result does not depend on the number of threads.

rows: scalar, the number u of rows of the matrix.
row_splits, positions, weights: as for Pool.
grad: [b, d], gradient of the result of Pool.
matrix_grad: [u, d], zeros for rows that no sample uses.
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
