// SPDX-License-Identifier: Apache-2.0
//
// Combine and its gradient without the sums, which differ between CPU and GPU.
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_COMBINE_KERNEL_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_COMBINE_KERNEL_H_

#include <vector>

#include "custom_ops/codec/placement_plan.h"
#include "custom_ops/common/allocate_output.h"
#include "custom_ops/lookup/combine_functor.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {

// The result of one feature: [samples, dim].
struct CombineResult {
  float* out;
  int64_t samples;
  int64_t dim;
};

// The gradient of such a result: [samples, dim].
struct CombineGradient {
  const float* grad;
  int64_t dim;
};

// Common part of Combine and its gradient: the plan, and the ranges of columns
// of all features.
class CombineBase : public tensorflow::OpKernel {
 public:
  explicit CombineBase(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, plan_.Read(ctx));
    int features;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("F", &features));
    OP_REQUIRES(ctx, features == plan_.features().size(),
                tensorflow::errors::InvalidArgument(
                    "features must have one element per result, ", features,
                    ". Received: ", plan_.features().size()));
    AddColumns();
  }

 protected:
  // Finds the column ranges of all features and their sections. `limits`
  // contains the number of samples of each feature.
  absl::Status FindColumns(const tensorflow::Tensor& sample_ids,
                           const tensorflow::Tensor& sample_splits,
                           const std::vector<int64_t>& limits,
                           std::vector<CombineColumns>* columns,
                           int64_t* values) const {
    const int64_t features = plan_.features().size();
    const int64_t world_size = plan_.world_size();
    if (sample_ids.dims() != 1 || sample_splits.dims() != 2 ||
        sample_splits.dim_size(0) != world_size ||
        sample_splits.dim_size(1) != features) {
      return tensorflow::errors::InvalidArgument(
          "sample_ids must be a vector and sample_splits of shape [",
          world_size, ", ", features,
          "]. Received shapes: ", sample_ids.shape().DebugString(), ", ",
          sample_splits.shape().DebugString());
    }
    *columns = columns_;
    const auto* ids = static_cast<const int32_t*>(sample_ids.data());
    const auto counts = sample_splits.matrix<int64_t>();
    int64_t left = sample_ids.NumElements();
    *values = 0;
    for (int64_t i = 0; i < world_size * features; ++i) {
      const int64_t count = counts(i / features, i % features);
      const PlacementPlan::Cell& cell =
          plan_.CellOf(i % features, i / features);
      if (count == 0) continue;
      if (count < 0 || count > left || !cell.exists) {
        return tensorflow::errors::InvalidArgument(
            "sample_splits[", i / features, ", ", i % features, "]=", count,
            " must be at least 0, at most ", left,
            " (the remaining sample_ids), and 0 if this rank has no cell of "
            "the "
            "feature's table");
      }
      if (!AscendingBelow(ids, count, limits[i % features])) {
        return tensorflow::errors::InvalidArgument(
            "sample_ids of rank ", i / features, " and feature ", i % features,
            " must be strictly ascending and in [0, ", limits[i % features],
            ")");
      }
      CombineColumns& target =
          (*columns)[first_columns_[i % features] + cell.column_part];
      target.sections[cell.row_part] = {ids, count, *values};
      *values += count * target.width;
      ids += count;
      left -= count;
    }
    if (left != 0) {
      return tensorflow::errors::InvalidArgument(
          "sample_splits must sum to the number of sample_ids, ",
          sample_ids.NumElements(), ". Received a sum of ",
          sample_ids.NumElements() - left);
    }
    return absl::OkStatus();
  }

  static absl::Status ReadScale(const tensorflow::Tensor& scale, float* value) {
    if (scale.NumElements() != 1) {
      return tensorflow::errors::InvalidArgument(
          "gradient_scale must be a scalar. Received shape: ",
          scale.shape().DebugString());
    }
    *value = *static_cast<const float*>(scale.data());
    return absl::OkStatus();
  }

  int64_t dim(size_t f) const { return plan_.features()[f].dim; }

  PlacementPlan plan_;

 private:
  void AddColumns() {
    for (size_t f = 0; f < plan_.features().size(); ++f) {
      const FeaturePlacement& feature = plan_.features()[f];
      first_columns_.push_back(columns_.size());
      for (int64_t j = 0; j < feature.column_parts; ++j) {
        const int64_t begin = feature.FirstColumn(j);
        columns_.push_back({static_cast<int64_t>(f), begin,
                            feature.FirstColumn(j + 1) - begin,
                            std::vector<CombineSection>(feature.row_parts)});
      }
    }
  }

  std::vector<CombineColumns> columns_;  // without sections
  std::vector<size_t> first_columns_;    // by feature
};

// `Where::Combine(ctx, columns, parts, results)` computes the sums. The
// sample_ids are in host memory.
template <typename Where>
class CombineKernel : public CombineBase {
 public:
  using CombineBase::CombineBase;

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tensorflow::Tensor& parts = ctx->input(0);
    const tensorflow::Tensor& samples = ctx->input(3);
    const size_t features = plan_.features().size();
    OP_REQUIRES(
        ctx, samples.dims() == 1 && samples.NumElements() == features,
        tensorflow::errors::InvalidArgument(
            "samples must have ", features,
            " elements. Received shape: ", samples.shape().DebugString()));
    const auto counts = samples.vec<int64_t>();
    std::vector<CombineResult> results;
    std::vector<int64_t> limits;
    for (size_t f = 0; f < features; ++f) {
      OP_REQUIRES(ctx, counts(f) >= 0,
                  tensorflow::errors::InvalidArgument(
                      "samples[", f, "]=", counts(f), " must be at least 0"));
      tensorflow::Tensor* result = nullptr;
      OP_REQUIRES_OK(ctx, AllocateOutput(ctx, f, {counts(f), dim(f)}, &result));
      results.push_back(
          {static_cast<float*>(result->data()), counts(f), dim(f)});
      limits.push_back(counts(f));
    }
    std::vector<CombineColumns> columns;
    int64_t values = 0;
    OP_REQUIRES_OK(ctx, FindColumns(ctx->input(1), ctx->input(2), limits,
                                    &columns, &values));
    OP_REQUIRES(ctx, parts.dims() == 1 && parts.NumElements() == values,
                tensorflow::errors::InvalidArgument(
                    "parts must have ", values, " elements. Received shape: ",
                    parts.shape().DebugString()));
    OP_REQUIRES_OK(
        ctx, Where::Combine(ctx, columns,
                            static_cast<const float*>(parts.data()), results));
  }
};

// `Where::CombineGrad(ctx, columns, grads, scale, values)` computes the
// gradient.
template <typename Where>
class CombineGradKernel : public CombineBase {
 public:
  using CombineBase::CombineBase;

  void Compute(tensorflow::OpKernelContext* ctx) override {
    tensorflow::OpInputList grads;
    OP_REQUIRES_OK(ctx, ctx->input_list("grads", &grads));
    std::vector<int64_t> limits;
    std::vector<CombineGradient> from;
    for (int f = 0; f < grads.size(); ++f) {
      OP_REQUIRES(
          ctx, grads[f].dims() == 2 && grads[f].dim_size(1) == dim(f),
          tensorflow::errors::InvalidArgument(
              "grads[", f, "] must be a matrix of ", dim(f),
              " columns. Received shape: ", grads[f].shape().DebugString()));
      limits.push_back(grads[f].dim_size(0));
      from.push_back({static_cast<const float*>(grads[f].data()), dim(f)});
    }
    std::vector<CombineColumns> columns;
    int64_t numbers = 0;
    OP_REQUIRES_OK(
        ctx, FindColumns(ctx->input(grads.size()), ctx->input(grads.size() + 1),
                         limits, &columns, &numbers));
    float scale = 0;
    OP_REQUIRES_OK(ctx, ReadScale(ctx->input(grads.size() + 2), &scale));
    tensorflow::Tensor* values = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {numbers}, &values));
    OP_REQUIRES_OK(ctx,
                   Where::CombineGrad(ctx, columns, from, scale,
                                      static_cast<float*>(values->data())));
  }
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_COMBINE_KERNEL_H_
