// SPDX-License-Identifier: Apache-2.0
//
// Pool and its gradient without the sums, which differ between CPU and GPU.
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_POOL_KERNEL_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_POOL_KERNEL_H_

#include <cstddef>
#include <memory>

#include "custom_ops/codec/id_lists.h"
#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/radix_sort.h"
#include "custom_ops/lookup/lookup_functor.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {

inline absl::Status CheckPositions(const tensorflow::Tensor& row_splits,
                                   const tensorflow::Tensor& positions,
                                   const tensorflow::Tensor& weights,
                                   int64_t rows) {
  TF_RETURN_IF_ERROR(CheckIdList(0, positions, row_splits, weights,
                                 row_splits.NumElements() - 1));
  const int64_t count = positions.NumElements();
  const uint64_t highest =
      HighestRow(static_cast<const int64_t*>(positions.data()), count);
  if (count > 0 && highest >= static_cast<uint64_t>(rows)) {
    return tensorflow::errors::InvalidArgument(
        "Position ", static_cast<int64_t>(highest),
        " is out of range: the matrix has ", rows, " rows");
  }
  return absl::OkStatus();
}

// `Sums::Sum(ctx, sum, table_rows, segments)` computes the sums. Only `table`
// and `out` may be device memory. All rows are within the table.
template <typename Sums>
class PoolKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tensorflow::Tensor& matrix = ctx->input(0);
    const tensorflow::Tensor& row_splits = ctx->input(1);
    const tensorflow::Tensor& positions = ctx->input(2);
    const tensorflow::Tensor& weights = ctx->input(3);
    OP_REQUIRES(ctx, matrix.dims() == 2,
                tensorflow::errors::InvalidArgument(
                    "matrix must be a matrix. Received shape: ",
                    matrix.shape().DebugString()));
    OP_REQUIRES_OK(ctx, CheckPositions(row_splits, positions, weights,
                                       matrix.dim_size(0)));
    const int64_t samples = row_splits.NumElements() - 1;
    const int64_t width = matrix.dim_size(1);
    tensorflow::Tensor* pooled = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {samples, width}, &pooled));
    const SegmentSum sum = {static_cast<const float*>(matrix.data()),
                            width,
                            static_cast<const int64_t*>(row_splits.data()),
                            static_cast<const int64_t*>(positions.data()),
                            WeightsOrNull(weights),
                            static_cast<float*>(pooled->data())};
    OP_REQUIRES_OK(ctx, Sums::Sum(ctx, sum, matrix.dim_size(0), samples));
  }
};

// The entries of a batch, sorted by position. Position p has the entries
// row_splits[p] .. row_splits[p + 1], in the order of the samples.
struct EntriesByPosition {
  std::unique_ptr<int64_t[]> row_splits;
  std::unique_ptr<int64_t[]> samples;
  std::unique_ptr<float[]> weights;  // null if all are 1
};

// Uses a counting sort with one bin per position. There are about as many
// positions as entries.
inline void Transpose(const int64_t* row_splits, int64_t samples,
                      const int64_t* positions, const float* weights,
                      int64_t rows, EntriesByPosition* result) {
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

template <typename Sums>
class PoolGradKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tensorflow::Tensor& row_splits = ctx->input(1);
    const tensorflow::Tensor& positions = ctx->input(2);
    const tensorflow::Tensor& weights = ctx->input(3);
    const tensorflow::Tensor& grad = ctx->input(4);
    OP_REQUIRES(ctx, ctx->input(0).NumElements() == 1,
                tensorflow::errors::InvalidArgument(
                    "rows must be a scalar. Received shape: ",
                    ctx->input(0).shape().DebugString()));
    const int64_t rows = *static_cast<const int64_t*>(ctx->input(0).data());
    OP_REQUIRES(ctx, rows >= 0 && rows <= kMaxIds,
                tensorflow::errors::InvalidArgument(
                    "rows must be in [0, ", kMaxIds, "]. Received: ", rows));
    OP_REQUIRES_OK(ctx, CheckPositions(row_splits, positions, weights, rows));
    const int64_t samples = row_splits.NumElements() - 1;
    OP_REQUIRES(ctx, grad.dims() == 2 && grad.dim_size(0) == samples,
                tensorflow::errors::InvalidArgument(
                    "grad must have one row for each of the ", samples,
                    " samples. Received shape: ", grad.shape().DebugString()));
    const int64_t width = grad.dim_size(1);
    tensorflow::Tensor* matrix_grad = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {rows, width}, &matrix_grad));
    EntriesByPosition entries;
    Transpose(static_cast<const int64_t*>(row_splits.data()), samples,
              static_cast<const int64_t*>(positions.data()),
              WeightsOrNull(weights), rows, &entries);
    const SegmentSum sum = {static_cast<const float*>(grad.data()),
                            width,
                            entries.row_splits.get(),
                            entries.samples.get(),
                            entries.weights.get(),
                            static_cast<float*>(matrix_grad->data())};
    OP_REQUIRES_OK(ctx, Sums::Sum(ctx, sum, samples, rows));
  }
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_POOL_KERNEL_H_
