// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <memory>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/radix_sort.h"
#include "custom_ops/embedding/id_lists.h"
#include "custom_ops/embedding/lookup_functor.h"
#include "custom_ops/embedding/parallel_segments.h"
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

absl::Status CheckPositions(const Tensor& row_splits, const Tensor& positions,
                            const Tensor& weights, int64_t rows) {
  TF_RETURN_IF_ERROR(CheckIdList(0, positions, row_splits, weights,
                                 row_splits.NumElements() - 1));
  const int64_t count = positions.NumElements();
  const uint64_t highest =
      HighestRow(static_cast<const int64_t*>(positions.data()), count);
  if (count > 0 && highest >= static_cast<uint64_t>(rows)) {
    return InvalidArgument("Position ", static_cast<int64_t>(highest),
                           " is out of range: the matrix has ", rows, " rows");
  }
  return absl::OkStatus();
}

void SumAll(OpKernelContext* ctx, const SegmentSum& args, int64_t segments) {
  ParallelSegmentSums(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                      {{args, segments}},
                      [](size_t, int64_t, int64_t) { return true; });
}

class PoolOp : public OpKernel {
 public:
  explicit PoolOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& matrix = ctx->input(0);
    const Tensor& row_splits = ctx->input(1);
    const Tensor& positions = ctx->input(2);
    const Tensor& weights = ctx->input(3);
    OP_REQUIRES(ctx, matrix.dims() == 2,
                InvalidArgument("matrix must be a matrix. Received shape: ",
                                matrix.shape().DebugString()));
    OP_REQUIRES_OK(ctx, CheckPositions(row_splits, positions, weights,
                                       matrix.dim_size(0)));
    const int64_t samples = row_splits.NumElements() - 1;
    const int64_t width = matrix.dim_size(1);
    Tensor* pooled = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {samples, width}, &pooled));
    SumAll(ctx,
           {static_cast<const float*>(matrix.data()), width,
            static_cast<const int64_t*>(row_splits.data()),
            static_cast<const int64_t*>(positions.data()),
            WeightsOrNull(weights), static_cast<float*>(pooled->data())},
           samples);
  }
};

// The entries of a batch by position: those of position p are
// row_splits[p] .. row_splits[p + 1], in the order of the samples.
struct EntriesByPosition {
  std::unique_ptr<int64_t[]> row_splits;
  std::unique_ptr<int64_t[]> samples;
  std::unique_ptr<float[]> weights;  // null when all are 1
};

// As many bins as positions, which are about as many as the samples have
// entries.
void Transpose(const int64_t* row_splits, int64_t samples,
               const int64_t* positions, const float* weights, int64_t rows,
               EntriesByPosition* result) {
  const int64_t count = row_splits[samples];
  const std::unique_ptr<uint32_t[]> places(new uint32_t[rows]);
  CountingSort sort(places.get(), rows);
  for (int64_t i = 0; i < count; ++i) sort.Count(positions[i]);
  result->row_splits.reset(new int64_t[rows + 1]);
  result->row_splits[rows] =
      sort.Start([&](size_t p, uint32_t first, uint32_t) {
        result->row_splits[p] = first;
      });
  result->samples.reset(new int64_t[count]);
  if (weights != nullptr) result->weights.reset(new float[count]);
  for (int64_t s = 0; s < samples; ++s) {
    for (int64_t i = row_splits[s]; i < row_splits[s + 1]; ++i) {
      const uint32_t to = sort.Place(positions[i]);
      result->samples[to] = s;
      if (weights != nullptr) result->weights[to] = weights[i];
    }
  }
}

class PoolGradOp : public OpKernel {
 public:
  explicit PoolGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& row_splits = ctx->input(1);
    const Tensor& positions = ctx->input(2);
    const Tensor& weights = ctx->input(3);
    const Tensor& grad = ctx->input(4);
    OP_REQUIRES(ctx, ctx->input(0).NumElements() == 1,
                InvalidArgument("rows must be a scalar. Received shape: ",
                                ctx->input(0).shape().DebugString()));
    const int64_t rows = *static_cast<const int64_t*>(ctx->input(0).data());
    OP_REQUIRES(ctx, rows >= 0 && rows <= kMaxIds,
                InvalidArgument("rows must be in [0, ", kMaxIds,
                                "]. Received: ", rows));
    OP_REQUIRES_OK(ctx, CheckPositions(row_splits, positions, weights, rows));
    const int64_t samples = row_splits.NumElements() - 1;
    OP_REQUIRES(ctx, grad.dims() == 2 && grad.dim_size(0) == samples,
                InvalidArgument(
                    "grad must have one row for each of the ", samples,
                    " samples. Received shape: ", grad.shape().DebugString()));
    const int64_t width = grad.dim_size(1);
    Tensor* matrix_grad = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {rows, width}, &matrix_grad));
    EntriesByPosition entries;
    Transpose(static_cast<const int64_t*>(row_splits.data()), samples,
              static_cast<const int64_t*>(positions.data()),
              WeightsOrNull(weights), rows, &entries);
    SumAll(ctx,
           {static_cast<const float*>(grad.data()), width,
            entries.row_splits.get(), entries.samples.get(),
            entries.weights.get(), static_cast<float*>(matrix_grad->data())},
           rows);
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Pool").Device(tensorflow::DEVICE_CPU),
                        PoolOp);
REGISTER_KERNEL_BUILDER(Name("Tfdist>PoolGrad").Device(tensorflow::DEVICE_CPU),
                        PoolGradOp);

}  // namespace
}  // namespace tfdist
