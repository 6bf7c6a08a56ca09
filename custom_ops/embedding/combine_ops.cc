// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/embedding/combine_functor.h"
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
    .Attr("dims: list(int)")
    .Attr("row_parts: list(int)")
    .Attr("column_parts: list(int)")
    .Attr("ranks: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      if (static_cast<int>(dims.size()) != c->num_outputs()) {
        return InvalidArgument("dims must have one element per feature");
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
dims: columns of every feature's table.
row_parts: of every feature's table.
column_parts: of every feature's table.
ranks: the owners of the cells of every feature's table, features behind each
  other.
)doc");

REGISTER_OP("Tfdist>CombineGrad")
    .Input("grads: F * float")
    .Input("sample_ids: int32")
    .Input("sample_splits: int64")
    .Input("gradient_scale: float")
    .Output("values: float")
    .Attr("F: int >= 1")
    .Attr("world_size: int >= 1")
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
gradient_scale: scalar; where it is 0 the result is, even if grads hold NaN.
values: for every rank, the gradient of what it sent.
)doc");

// About a nanosecond for four numbers.
int64_t Nanoseconds(int64_t width) { return width / 4 + 4; }

// What Combine and its gradient share: which columns of which feature lie on
// which rank.
class CombineBase : public OpKernel {
 public:
  explicit CombineBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("world_size", &world_size_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("row_parts", &row_parts_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("column_parts", &column_parts_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ranks", &ranks_));
    int features;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("F", &features));
    const size_t size = features;
    OP_REQUIRES(ctx,
                dims_.size() == size && row_parts_.size() == size &&
                    column_parts_.size() == size,
                InvalidArgument("dims, row_parts and column_parts must have ",
                                features, " elements"));
    OP_REQUIRES_OK(ctx, FindCells());
  }

 protected:
  // The columns of all features with the sections they get. `limits` has the
  // samples of every feature.
  absl::Status FindColumns(const Tensor& sample_ids,
                           const Tensor& sample_splits,
                           const std::vector<int64_t>& limits,
                           std::vector<CombineColumns>* columns,
                           int64_t* values) const {
    const int64_t features = dims_.size();
    if (sample_ids.dims() != 1 || sample_splits.dims() != 2 ||
        sample_splits.dim_size(0) != world_size_ ||
        sample_splits.dim_size(1) != features) {
      return InvalidArgument(
          "sample_ids must be a vector and sample_splits of shape [",
          world_size_, ", ", features,
          "]. Received shapes: ", sample_ids.shape().DebugString(), ", ",
          sample_splits.shape().DebugString());
    }
    *columns = columns_;
    const auto* ids = static_cast<const int32_t*>(sample_ids.data());
    const auto counts = sample_splits.matrix<int64_t>();
    int64_t left = sample_ids.NumElements();
    *values = 0;
    for (int64_t i = 0; i < world_size_ * features; ++i) {
      const int64_t count = counts(i / features, i % features);
      const Cell& cell = cells_[i];
      if (count == 0) continue;
      if (count < 0 || count > left || cell.columns < 0) {
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
      CombineColumns& target = (*columns)[cell.columns];
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

  int64_t world_size_ = 1;
  std::vector<int64_t> dims_;

 private:
  // Where in `columns` the cell of a rank and feature is; -1 without one.
  struct Cell {
    int64_t columns = -1;
    int64_t row_part = 0;
  };

  absl::Status FindCells() {
    const int64_t features = dims_.size();
    cells_.resize(world_size_ * features);
    size_t next = 0;
    for (int64_t f = 0; f < features; ++f) {
      const int64_t rows = row_parts_[f];
      const int64_t parts = column_parts_[f];
      if (rows < 1 || parts < 1 || rows > world_size_ || parts > world_size_ ||
          dims_[f] < 0 || next + rows * parts > ranks_.size()) {
        return InvalidArgument("Feature ", f, " has dim ", dims_[f], " in ",
                               rows, " x ", parts, " cells; ranks has ",
                               ranks_.size() - next, " elements left");
      }
      const int64_t first = columns_.size();
      for (int64_t j = 0; j < parts; ++j) {
        const int64_t begin = j * dims_[f] / parts;
        columns_.push_back({f, begin, (j + 1) * dims_[f] / parts - begin,
                            std::vector<CombineSection>(rows)});
      }
      for (int64_t cell = 0; cell < rows * parts; ++cell) {
        const int64_t rank = ranks_[next++];
        if (rank < 0 || rank >= world_size_ ||
            cells_[rank * features + f].columns >= 0) {
          return InvalidArgument("Feature ", f, " has rank ", rank,
                                 " twice or outside of the world");
        }
        cells_[rank * features + f] = {first + cell % parts, cell / parts};
      }
    }
    if (next != ranks_.size()) {
      return InvalidArgument("ranks has ", ranks_.size(), " elements for ",
                             next, " cells");
    }
    return absl::OkStatus();
  }

  std::vector<int64_t> row_parts_;
  std::vector<int64_t> column_parts_;
  std::vector<int64_t> ranks_;
  std::vector<Cell> cells_;              // [world_size, features]
  std::vector<CombineColumns> columns_;  // without sections
};

class CombineOp : public CombineBase {
 public:
  using CombineBase::CombineBase;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& parts = ctx->input(0);
    const Tensor& samples = ctx->input(3);
    OP_REQUIRES(
        ctx, samples.dims() == 1 && samples.NumElements() == dims_.size(),
        InvalidArgument(
            "samples must have ", dims_.size(),
            " elements. Received shape: ", samples.shape().DebugString()));
    const auto counts = samples.vec<int64_t>();
    std::vector<float*> results;
    std::vector<int64_t> limits;
    for (size_t f = 0; f < dims_.size(); ++f) {
      OP_REQUIRES(ctx, counts(f) >= 0,
                  InvalidArgument("samples[", f, "]=", counts(f),
                                  " must be at least 0"));
      Tensor* result = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(
                              f, TensorShape({counts(f), dims_[f]}), &result));
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
                    CombineCpu(columns[i], from, dims_[f], begin, end,
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
      OP_REQUIRES(ctx, grads[f].dims() == 2 && grads[f].dim_size(1) == dims_[f],
                  InvalidArgument("grads[", f, "] must be a matrix of ",
                                  dims_[f], " columns. Received shape: ",
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
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(0, TensorShape({numbers}), &values));
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
                                   dims_[f], scale, begin, end, to);
                  });
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Combine").Device(tensorflow::DEVICE_CPU),
                        CombineOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>CombineGrad").Device(tensorflow::DEVICE_CPU), CombineGradOp);

}  // namespace
}  // namespace tfdist
