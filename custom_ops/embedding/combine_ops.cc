// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/embedding/combine_functor.h"
#include "custom_ops/embedding/placement_plan.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>Combine")
    .Input("parts: float")
    .Input("sample_ids: int32")
    .Input("sample_splits: int64")
    .Input("samples: int64")
    .Input("gradient_scale: float")
    .Output("results: F * float")
    .Attr("F: int >= 1")
    .Attr("world_size: int >= 1")
    .Attr("features: list(string)")
    .Attr("vocabulary_sizes: list(int)")
    .Attr("dims: list(int)")
    .Attr("row_parts: list(int)")
    .Attr("column_parts: list(int)")
    .Attr("ranks: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      if (static_cast<int>(dims.size()) != c->num_outputs()) {
        return InvalidArgument("dims must have one element per feature. ",
                               "Received: ", dims.size(), " for ",
                               c->num_outputs(), " results");
      }
      for (size_t f = 0; f < dims.size(); ++f) {
        c->set_output(f, c->Matrix(InferenceContext::kUnknownDim, dims[f]));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Puts the pooled results of all owners together, the last stage of a lookup.

Row parts of a table are summed, in their order, column parts put beside each
other.

parts: the values of Lookup that rank 0 sent to this one, then those of rank 1,
  and so on; of every rank by feature, then by sample.
sample_ids: the samples they belong to, ascending for a rank and feature.
sample_splits: [world_size, F], how many samples those are.
samples: [F], samples of every feature in this rank's batch.
gradient_scale: scalar; what the gradient is multiplied with.
results: [samples, dim] of every feature; zeros for samples without ids.
features, vocabulary_sizes, dims, row_parts, column_parts, ranks: as in
  EncodeIds.
)doc");

REGISTER_OP("Tfdist>CombineGrad")
    .Input("grads: F * float")
    .Input("sample_ids: int32")
    .Input("sample_splits: int64")
    .Input("gradient_scale: float")
    .Output("values: float")
    .Attr("F: int >= 1")
    .Attr("world_size: int >= 1")
    .Attr("features: list(string)")
    .Attr("vocabulary_sizes: list(int)")
    .Attr("dims: list(int)")
    .Attr("row_parts: list(int)")
    .Attr("column_parts: list(int)")
    .Attr("ranks: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The gradient of Combine with respect to its parts.

grads: the gradients of Combine's results.
sample_ids: as given to Combine.
sample_splits: as given to Combine.
features, vocabulary_sizes, dims, row_parts, column_parts, ranks: as given to
  Combine.
gradient_scale: scalar; where it is 0 the result is, even if grads hold NaN.
values: for every rank, the gradient of what it sent.
)doc");

// About a nanosecond for four numbers.
int64_t Nanoseconds(int64_t width) { return width / 4 + 4; }

// What Combine and its gradient share: the plan, and how the columns of all
// features are cut.
class CombineBase : public OpKernel {
 public:
  explicit CombineBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, plan_.Read(ctx));
    int features;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("F", &features));
    OP_REQUIRES(ctx, features == plan_.features().size(),
                InvalidArgument(
                    "features must have an element for each of ", "the ",
                    features, " results. Received: ", plan_.features().size()));
    AddColumns();
  }

 protected:
  // The columns of all features with the sections they get. `limits` has the
  // samples of every feature.
  absl::Status FindColumns(const Tensor& sample_ids,
                           const Tensor& sample_splits,
                           const std::vector<int64_t>& limits,
                           std::vector<CombineColumns>* columns,
                           int64_t* values) const {
    const int64_t features = plan_.features().size();
    const int64_t world_size = plan_.world_size();
    if (sample_ids.dims() != 1 || sample_splits.dims() != 2 ||
        sample_splits.dim_size(0) != world_size ||
        sample_splits.dim_size(1) != features) {
      return InvalidArgument(
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
        return InvalidArgument(
            "sample_splits[", i / features, ", ", i % features, "]=", count,
            " must be at least 0, at most the ", left,
            " sample_ids that are left, and 0 where no cell is");
      }
      if (!AscendingBelow(ids, count, limits[i % features])) {
        return InvalidArgument("sample_ids of rank ", i / features,
                               " and feature ", i % features,
                               " must ascend below ", limits[i % features]);
      }
      CombineColumns& target =
          (*columns)[first_columns_[i % features] + cell.column_part];
      target.sections[cell.row_part] = {ids, count, *values};
      *values += count * target.width;
      ids += count;
      left -= count;
    }
    if (left != 0) {
      return InvalidArgument("sample_splits leave ", left, " sample_ids over");
    }
    return absl::OkStatus();
  }

  static absl::Status ReadScale(const Tensor& scale, float* value) {
    if (scale.NumElements() != 1) {
      return InvalidArgument("gradient_scale must be a scalar. Received shape:",
                             " ", scale.shape().DebugString());
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
  std::vector<size_t> first_columns_;    // of every feature
};

class CombineOp : public CombineBase {
 public:
  using CombineBase::CombineBase;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& parts = ctx->input(0);
    const Tensor& samples = ctx->input(3);
    const size_t features = plan_.features().size();
    OP_REQUIRES(ctx, samples.dims() == 1 && samples.NumElements() == features,
                InvalidArgument("samples must have ", features,
                                " elements. Received shape: ",
                                samples.shape().DebugString()));
    const auto counts = samples.vec<int64_t>();
    std::vector<float*> results;
    std::vector<int64_t> limits;
    for (size_t f = 0; f < features; ++f) {
      OP_REQUIRES(ctx, counts(f) >= 0,
                  InvalidArgument("samples[", f, "]=", counts(f),
                                  " must be at least 0"));
      Tensor* result = nullptr;
      OP_REQUIRES_OK(ctx, AllocateOutput(ctx, f, {counts(f), dim(f)}, &result));
      results.push_back(static_cast<float*>(result->data()));
      limits.push_back(counts(f));
    }
    std::vector<CombineColumns> columns;
    int64_t values = 0;
    OP_REQUIRES_OK(ctx, FindColumns(ctx->input(1), ctx->input(2), limits,
                                    &columns, &values));
    OP_REQUIRES(ctx, parts.dims() == 1 && parts.NumElements() == values,
                InvalidArgument("parts must have ", values,
                                " elements. Received shape: ",
                                parts.shape().DebugString()));
    std::vector<Task> tasks;
    for (const CombineColumns& each : columns) {
      tasks.push_back({limits[each.feature],
                       Nanoseconds(each.width) *
                           static_cast<int64_t>(each.sections.size())});
    }
    const auto* from = static_cast<const float*>(parts.data());
    ParallelTasks(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                  tasks, [&](size_t i, int64_t begin, int64_t end) {
                    const int64_t f = columns[i].feature;
                    CombineCpu(columns[i], from, dim(f), begin, end,
                               results[f]);
                  });
  }
};

class CombineGradOp : public CombineBase {
 public:
  using CombineBase::CombineBase;

  void Compute(OpKernelContext* ctx) override {
    OpInputList grads;
    OP_REQUIRES_OK(ctx, ctx->input_list("grads", &grads));
    std::vector<int64_t> limits;
    for (int f = 0; f < grads.size(); ++f) {
      OP_REQUIRES(ctx, grads[f].dims() == 2 && grads[f].dim_size(1) == dim(f),
                  InvalidArgument("grads[", f, "] must be a matrix of ", dim(f),
                                  " columns. Received shape: ",
                                  grads[f].shape().DebugString()));
      limits.push_back(grads[f].dim_size(0));
    }
    std::vector<CombineColumns> columns;
    int64_t numbers = 0;
    OP_REQUIRES_OK(
        ctx, FindColumns(ctx->input(grads.size()), ctx->input(grads.size() + 1),
                         limits, &columns, &numbers));
    float scale;
    OP_REQUIRES_OK(ctx, ReadScale(ctx->input(grads.size() + 2), &scale));
    Tensor* values = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {numbers}, &values));
    struct Part {
      const CombineColumns* columns;
      const CombineSection* section;
    };
    std::vector<Part> parts;
    std::vector<Task> tasks;
    for (const CombineColumns& each : columns) {
      for (const CombineSection& section : each.sections) {
        parts.push_back({&each, &section});
        tasks.push_back({section.samples, Nanoseconds(each.width)});
      }
    }
    auto* to = static_cast<float*>(values->data());
    ParallelTasks(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                  tasks, [&](size_t i, int64_t begin, int64_t end) {
                    const int64_t f = parts[i].columns->feature;
                    CombineGradCpu(*parts[i].columns, *parts[i].section,
                                   static_cast<const float*>(grads[f].data()),
                                   dim(f), scale, begin, end, to);
                  });
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Combine").Device(tensorflow::DEVICE_CPU),
                        CombineOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>CombineGrad").Device(tensorflow::DEVICE_CPU), CombineGradOp);

}  // namespace
}  // namespace tfdist
