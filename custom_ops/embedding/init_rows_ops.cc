// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "counter_random.h"
#include "placement.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/lib/core/threadpool.h"
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

// The block of a [rows, dim] table that one rank holds.
struct Block {
  int64_t rank = 0;
  int64_t world_size = 1;
  int64_t rows = 0;
  int64_t dim = 0;
  bool row_placement = true;

  int64_t LocalRows() const {
    return row_placement ? RotatedMod::LocalRows(rows, world_size) : rows;
  }
  int64_t FirstColumn() const {
    return row_placement ? 0 : rank * dim / world_size;
  }
  int64_t LocalDim() const {
    return row_placement ? dim : (rank + 1) * dim / world_size - FirstColumn();
  }
};

template <typename Context>
absl::Status ReadBlock(Context* ctx, Block* block) {
  std::string placement;
  TF_RETURN_IF_ERROR(ctx->GetAttr("rank", &block->rank));
  TF_RETURN_IF_ERROR(ctx->GetAttr("world_size", &block->world_size));
  TF_RETURN_IF_ERROR(ctx->GetAttr("rows", &block->rows));
  TF_RETURN_IF_ERROR(ctx->GetAttr("dim", &block->dim));
  TF_RETURN_IF_ERROR(ctx->GetAttr("placement", &placement));
  block->row_placement = placement == "row";
  if (block->rank >= block->world_size ||
      block->world_size > RotatedMod::kMaxWorldSize ||
      block->rows > RotatedMod::kMaxRows || block->dim > (1 << 30)) {
    return InvalidArgument(
        "InitRows needs 0 <= rank < world_size <= 2^20, rows <= 2^40 and dim "
        "<= 2^30. Received: rank=",
        block->rank, ", world_size=", block->world_size, ", rows=", block->rows,
        ", dim=", block->dim);
  }
  return absl::OkStatus();
}

REGISTER_OP("Tfdist>InitRows")
    .Input("seed: int64")
    .Output("block: float")
    .Attr("rank: int >= 0")
    .Attr("world_size: int >= 1")
    .Attr("rows: int >= 1")
    .Attr("dim: int >= 1")
    .Attr("placement: {'row', 'column'}")
    .Attr(
        "distribution: "
        "{'constant', 'uniform', 'normal', 'truncated_normal'}")
    .Attr("a: float")
    .Attr("b: float")
    .SetShapeFn([](InferenceContext* c) {
      Block block;
      TF_RETURN_IF_ERROR(ReadBlock(c, &block));
      c->set_output(0, c->Matrix(block.LocalRows(), block.LocalDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Makes this rank's block of a table's initial values.

Element (id, column) is a function of them and of the seed alone, so that the
table is the same for any world size and placement. Padding rows are zero.

seed: scalar.
block: [local rows, local columns].
a: the constant; the lower bound; the mean.
b: unused; the upper bound; the standard deviation.
distribution: "truncated_normal" draws within two standard deviations.
)doc");

enum class Distribution { kConstant, kUniform, kNormal, kTruncatedNormal };

class InitRowsOp : public OpKernel {
 public:
  explicit InitRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadBlock(ctx, &block_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("a", &a_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("b", &b_));
    std::string name;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("distribution", &name));
    distribution_ = name == "constant"  ? Distribution::kConstant
                    : name == "uniform" ? Distribution::kUniform
                    : name == "normal"  ? Distribution::kNormal
                                        : Distribution::kTruncatedNormal;
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& seed = ctx->input(0);
    OP_REQUIRES(ctx, seed.NumElements() == 1,
                InvalidArgument("seed must be a scalar. Received shape: ",
                                seed.shape().DebugString()));
    const uint64_t key = *static_cast<const int64_t*>(seed.data());
    const int64_t local_rows = block_.LocalRows();
    const int64_t local_dim = block_.LocalDim();
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(
                            0, TensorShape({local_rows, local_dim}), &output));
    auto* data = static_cast<float*>(output->data());
    const RotatedMod placement(block_.world_size);
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    const int64_t cost =
        (distribution_ == Distribution::kConstant ? 1 : 10) * local_dim + 10;
    pool->ParallelFor(local_rows, cost, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const int64_t id =
            block_.row_placement ? placement.Id(block_.rank, row) : row;
        float* out = data + row * local_dim;
        if (id >= block_.rows) {
          std::fill_n(out, local_dim, 0.0f);
        } else if (distribution_ == Distribution::kConstant) {
          std::fill_n(out, local_dim, a_);
        } else {
          FillRow(key, id, out);
        }
      }
    });
  }

 private:
  // Four columns share one draw of random words, counted from column 0 of the
  // table so that a block of columns draws what the whole row would.
  void FillRow(uint64_t key, int64_t id, float* out) const {
    const int64_t begin = block_.FirstColumn();
    const int64_t end = begin + block_.LocalDim();
    for (int64_t column = begin; column < end;) {
      const auto words = Philox(key, id, column / 4);
      const int64_t stop = std::min(end, column / 4 * 4 + 4);
      for (; column < stop; ++column) {
        *out++ = Value(words[column % 4]);
      }
    }
  }

  float Value(uint32_t bits) const {
    // P(X < -2) of a standard normal variable X.
    constexpr double kTail = 0.022750131948179195;
    constexpr double kScale = 1.0 / 4294967296.0;
    const double uniform = (bits + 0.5) * kScale;
    if (distribution_ == Distribution::kUniform) {
      // 24 bits are exact in float: the upper bound is never reached by
      // rounding the fraction up to 1.
      const float fraction = static_cast<float>(bits >> 8) * 0x1p-24f;
      return a_ + (b_ - a_) * fraction;
    }
    const double probability = distribution_ == Distribution::kNormal
                                   ? uniform
                                   : kTail + (1 - 2 * kTail) * uniform;
    return static_cast<float>(a_ + b_ * NormalQuantile(probability));
  }

  Block block_;
  Distribution distribution_ = Distribution::kConstant;
  float a_ = 0;
  float b_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>InitRows").Device(tensorflow::DEVICE_CPU),
                        InitRowsOp);

}  // namespace
}  // namespace tfdist
