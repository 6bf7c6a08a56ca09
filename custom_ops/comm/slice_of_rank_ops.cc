// SPDX-License-Identifier: Apache-2.0
//
// Slices of this rank from a batch of tensors, SparseTensors and RaggedTensors.
//
// One op slices the entire batch. With TensorFlow's ops, a slice would take a
// dozen ops for each value. Every loop of Keras would trace them again, and
// tf.data would process all of them again for every iterator.
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/common/message.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Kinds of values of a batch: 0 for a tensor, -1 for a SparseTensor (three
// tensors), and k > 0 for a RaggedTensor (flat values and k row splits).
constexpr int kDense = 0;
constexpr int kSparse = -1;

int TensorsOf(int kind) { return kind == kSparse ? 3 : 1 + kind; }

// Rows [start, stop) of a value.
struct Rows {
  int64_t start;
  int64_t stop;

  // Returns the rows of a rank, of n rows.
  static Rows Of(int64_t n, int rank, int world_size) {
    return {rank * n / world_size, (rank + 1) * n / world_size};
  }
  int64_t size() const { return stop - start; }
};

absl::Status InferShapes(InferenceContext* c) {
  std::vector<int> kinds;
  int rank = 0;
  int world_size = 1;
  TF_RETURN_IF_ERROR(c->GetAttr("kinds", &kinds));
  TF_RETURN_IF_ERROR(c->GetAttr("rank", &rank));
  TF_RETURN_IF_ERROR(c->GetAttr("world_size", &world_size));
  int place = 0;
  for (const int kind : kinds) {
    if (place + TensorsOf(kind) > c->num_inputs()) {
      return InvalidArgument("kinds require more than the ", c->num_inputs(),
                             " tensors of parts");
    }
    const ShapeHandle first = c->input(place);
    if (kind == kSparse) {
      DimensionHandle width = c->UnknownDim();
      if (c->RankKnown(first)) width = c->Dim(first, -1);
      c->set_output(place, c->Matrix(c->UnknownDim(), width));
      c->set_output(place + 1, c->Vector(c->UnknownDim()));
      c->set_output(place + 2, c->input(place + 2));
      place += 3;
      continue;
    }
    ShapeHandle part = first;
    if (c->RankKnown(first)) {
      DimensionHandle size = c->UnknownDim();
      const DimensionHandle whole = c->Dim(first, 0);
      if (kind == kDense && c->ValueKnown(whole)) {
        const int64_t known =
            Rows::Of(c->Value(whole), rank, world_size).size();
        // Keras skips the losses of a batch that it knows to be empty. Ranks
        // with samples would then make exchanges that ranks without samples do
        // not.
        if (known > 0) size = c->MakeDim(known);
      }
      TF_RETURN_IF_ERROR(c->ReplaceDim(first, 0, size, &part));
    }
    c->set_output(place++, part);
    for (int i = 0; i < kind; ++i) {
      c->set_output(place++, c->Vector(c->UnknownDim()));
    }
  }
  return absl::OkStatus();
}

REGISTER_OP("Tfdist>SliceOfRank")
    .Input("parts: T")
    .Output("slices: T")
    .Attr("T: list(type) >= 1")
    .Attr("kinds: list(int) >= 1")
    .Attr("rank: int >= 0")
    .Attr("world_size: int >= 1")
    .SetShapeFn(InferShapes)
    .Doc(R"doc(
Copies this rank's samples of each value of a batch.

A value of n samples is sliced to samples [rank * n // W, (rank + 1) * n // W),
where W is the world size.

parts: tensors of all values, in order.
slices: tensors of the sliced values, in the same order and in new memory.
kinds: the kind of each value. 0: a tensor [n, ...]. -1: a SparseTensor, which
  has three tensors: indices, values and dense shape. k > 0: a RaggedTensor,
  which has 1 + k tensors: flat values, and k row splits, outermost first.
rank: rank whose samples are copied.
world_size: number of ranks.
)doc");

// Copies rows of a tensor to new memory.
absl::Status CopyRows(const Tensor& from, const Rows& rows, Tensor* to) {
  if (from.dims() < 1 || rows.start < 0 || rows.start > rows.stop ||
      rows.stop > from.dim_size(0)) {
    return InvalidArgument("rows [", rows.start, ", ", rows.stop,
                           ") must be within the first dimension of the "
                           "value. Received shape: ",
                           from.shape().DebugString());
  }
  *to = tensorflow::tensor::DeepCopy(from.Slice(rows.start, rows.stop));
  return absl::OkStatus();
}

// Copies the row splits of `rows`, and sets `rows` to the corresponding rows of
// the next inner level.
// The row splits refer to `size` rows of that level.
template <typename T>
absl::Status CutSplits(const Tensor& from, int64_t size, Rows* rows,
                       Tensor* to) {
  TF_RETURN_IF_ERROR(CopyRows(from, {rows->start, rows->stop + 1}, to));
  auto splits = to->vec<T>();
  const T first = splits(0);
  for (int64_t i = 0; i <= rows->size(); ++i) {
    const int64_t previous = i ? splits(i - 1) + first : 0;
    if (splits(i) < previous || splits(i) > size) {
      return InvalidArgument(
          "row splits of a RaggedTensor must ascend from 0 to ", size,
          ". Received: ", splits(i), " at position ", rows->start + i,
          " after ", previous);
    }
    splits(i) -= first;
  }
  *rows = {first, first + splits(rows->size())};
  return absl::OkStatus();
}

class SliceOfRankOp : public OpKernel {
 public:
  explicit SliceOfRankOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("kinds", &kinds_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rank", &rank_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("world_size", &world_size_));
    int tensors = 0;
    for (const int kind : kinds_) {
      OP_REQUIRES(
          ctx, kind >= kSparse,
          InvalidArgument("kinds must be at least -1. Received: ", kind));
      tensors += TensorsOf(kind);
    }
    OP_REQUIRES(ctx, rank_ < world_size_ && tensors == ctx->num_inputs(),
                InvalidArgument("parts must have ", tensors,
                                " tensors, as kinds require, and rank must be "
                                "less than world_size. Received: ",
                                ctx->num_inputs(), " tensors, rank ", rank_,
                                " of ", world_size_));
  }

  void Compute(OpKernelContext* ctx) override {
    int place = 0;
    for (const int kind : kinds_) {
      OP_REQUIRES(ctx, ctx->input_dtype(place) != tensorflow::DT_RESOURCE,
                  InvalidArgument("parts[", place,
                                  "] is a resource, which has no "
                                  "samples. Pass tensors"));
      const absl::Status cut =
          kind == kSparse ? CutSparse(ctx, place) : CutLists(ctx, place, kind);
      OP_REQUIRES(ctx, cut.ok(),
                  absl::Status(cut.code(),
                               Message("parts[", place, "]: ", cut.message())));
      place += TensorsOf(kind);
    }
  }

 private:
  // Slices a tensor, or the flat values of a RaggedTensor after its row splits.
  absl::Status CutLists(OpKernelContext* ctx, int place, int levels) {
    const Tensor& samples = ctx->input(levels ? place + 1 : place);
    if (samples.dims() < 1 || (levels && samples.dim_size(0) < 1)) {
      return InvalidArgument(
          levels ? "row splits of a RaggedTensor must not be empty"
                 : "a value must have a dimension of samples",
          ". Received shape: ", samples.shape().DebugString());
    }
    Rows rows =
        Rows::Of(samples.dim_size(0) - (levels ? 1 : 0), rank_, world_size_);
    for (int i = 1; i <= levels; ++i) {
      const Tensor& splits = ctx->input(place + i);
      const Tensor& next = ctx->input(i < levels ? place + i + 1 : place);
      if (splits.dims() != 1 || next.dims() < 1 ||
          next.dim_size(0) < (i < levels ? 1 : 0)) {
        return InvalidArgument(
            "row splits of a RaggedTensor must be vectors, "
            "not empty, and its values must have a dimension. Received "
            "shapes: ",
            splits.shape().DebugString(), " and ", next.shape().DebugString());
      }
      Tensor cut;
      // The row splits of an inner level have one element more than that level
      // has rows.
      const int64_t size = next.dim_size(0) - (i < levels ? 1 : 0);
      switch (splits.dtype()) {
        case tensorflow::DT_INT32:
          TF_RETURN_IF_ERROR(CutSplits<int32_t>(splits, size, &rows, &cut));
          break;
        case tensorflow::DT_INT64:
          TF_RETURN_IF_ERROR(CutSplits<int64_t>(splits, size, &rows, &cut));
          break;
        default:
          return InvalidArgument(
              "row splits must be int32 or int64. Received: ",
              tensorflow::DataTypeString(splits.dtype()));
      }
      ctx->set_output(place + i, std::move(cut));
    }
    Tensor values;
    TF_RETURN_IF_ERROR(CopyRows(ctx->input(place), rows, &values));
    ctx->set_output(place, std::move(values));
    return absl::OkStatus();
  }

  absl::Status CutSparse(OpKernelContext* ctx, int place) {
    const Tensor& indices = ctx->input(place);
    const Tensor& values = ctx->input(place + 1);
    const Tensor& shape = ctx->input(place + 2);
    if (indices.dtype() != tensorflow::DT_INT64 || indices.dims() != 2 ||
        shape.dtype() != tensorflow::DT_INT64 || shape.dims() != 1 ||
        shape.dim_size(0) < 1 || shape.dim_size(0) != indices.dim_size(1) ||
        values.dims() != 1 || values.dim_size(0) != indices.dim_size(0)) {
      return InvalidArgument(
          "a SparseTensor must have int64 indices [n, d], "
          "values [n] and an int64 shape [d]. Received "
          "shapes: ",
          indices.shape().DebugString(), ", ", values.shape().DebugString(),
          " and ", shape.shape().DebugString());
    }
    const Rows samples = Rows::Of(shape.vec<int64_t>()(0), rank_, world_size_);
    const auto places = indices.matrix<int64_t>();
    std::vector<Tensor> cut_indices, cut_values;
    const int64_t count = indices.dim_size(0);
    const auto is_mine = [&](int64_t i) {
      return places(i, 0) >= samples.start && places(i, 0) < samples.stop;
    };
    // Collects runs of consecutive entries. Ordered indices have one run.
    for (int64_t start = 0, end = 0; start < count; start = end + 1) {
      end = start;
      while (end < count && is_mine(end)) ++end;
      if (end == start) continue;
      cut_indices.push_back(indices.Slice(start, end));
      cut_values.push_back(values.Slice(start, end));
    }
    Tensor of_rank[3];
    TF_RETURN_IF_ERROR(Joined(indices, cut_indices, &of_rank[0]));
    TF_RETURN_IF_ERROR(Joined(values, cut_values, &of_rank[1]));
    of_rank[2] = tensorflow::tensor::DeepCopy(shape);
    of_rank[2].vec<int64_t>()(0) = samples.size();
    auto moved = of_rank[0].matrix<int64_t>();
    for (int64_t i = 0; i < of_rank[0].dim_size(0); ++i) {
      moved(i, 0) -= samples.start;
    }
    for (int i = 0; i < 3; ++i) {
      ctx->set_output(place + i, std::move(of_rank[i]));
    }
    return absl::OkStatus();
  }

  // Concatenates pieces of a tensor in new memory.
  static absl::Status Joined(const Tensor& whole,
                             const std::vector<Tensor>& pieces, Tensor* to) {
    if (pieces.size() > 1) return tensorflow::tensor::Concat(pieces, to);
    const Tensor piece = pieces.empty() ? whole.Slice(0, 0) : pieces[0];
    *to = tensorflow::tensor::DeepCopy(piece);
    return absl::OkStatus();
  }

  std::vector<int> kinds_;
  int rank_ = 0;
  int world_size_ = 1;
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>SliceOfRank").Device(tensorflow::DEVICE_CPU), SliceOfRankOp);

}  // namespace
}  // namespace tfdist
