// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/counter_random.h"
#include "custom_ops/common/huge_pages.h"
#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/embedding/normal_quantile.h"
#include "custom_ops/embedding/placement_plan.h"
#include "custom_ops/embedding/rotated_mod.h"
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

// One cell of a table: some parts of the rows, some of the columns.
struct Block {
  int64_t rows = 0;  // of the whole table
  int64_t row_part = 0;
  int64_t row_parts = 1;
  int64_t local_rows = 0;
  int64_t first_column = 0;
  int64_t local_dim = 0;
};

template <typename Context>
absl::Status ReadBlock(Context* ctx, Block* block) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("rows", &block->rows));
  TF_RETURN_IF_ERROR(ctx->GetAttr("row_part", &block->row_part));
  TF_RETURN_IF_ERROR(ctx->GetAttr("row_parts", &block->row_parts));
  TF_RETURN_IF_ERROR(ctx->GetAttr("local_rows", &block->local_rows));
  TF_RETURN_IF_ERROR(ctx->GetAttr("first_column", &block->first_column));
  TF_RETURN_IF_ERROR(ctx->GetAttr("local_dim", &block->local_dim));
  if (block->row_part >= block->row_parts ||
      block->row_parts > RotatedMod::kMaxWorldSize ||
      block->rows > RotatedMod::kMaxRows ||
      block->local_rows >
          RotatedMod::LocalRows(block->rows, block->row_parts) ||
      block->first_column > kMaxColumns || block->local_dim > kMaxColumns) {
    return InvalidArgument(
        "InitRows needs 0 <= row_part < row_parts <= 2^20, rows <= 2^40, "
        "local_rows <= ceil(rows / row_parts), and columns <= 2^30. Received: "
        "row_part=",
        block->row_part, ", row_parts=", block->row_parts,
        ", rows=", block->rows, ", local_rows=", block->local_rows,
        ", first_column=", block->first_column,
        ", local_dim=", block->local_dim);
  }
  return absl::OkStatus();
}

REGISTER_OP("Tfdist>InitRows")
    .Input("seed: int64")
    .Output("block: float")
    .Attr("rows: int >= 1")
    .Attr("row_part: int >= 0")
    .Attr("row_parts: int >= 1")
    .Attr("local_rows: int >= 0")
    .Attr("first_column: int >= 0")
    .Attr("local_dim: int >= 0")
    .Attr(
        "distribution: "
        "{'constant', 'uniform', 'normal', 'truncated_normal'}")
    .Attr("a: float")
    .Attr("b: float")
    .SetShapeFn([](InferenceContext* c) {
      Block block;
      TF_RETURN_IF_ERROR(ReadBlock(c, &block));
      c->set_output(0, c->Matrix(block.local_rows, block.local_dim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Makes one cell of a table's initial values.

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
    const int64_t num_rows = block_.local_rows;
    const int64_t local_dim = block_.local_dim;
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {num_rows, local_dim}, &output));
    auto* data = static_cast<float*>(output->data());
    AdviseHugePages(data, output->TotalBytes());
    const RotatedMod placement(block_.row_parts);
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    const int64_t cost =
        (distribution_ == Distribution::kConstant ? 1 : 10) * local_dim + 10;
    ParallelUnits(pool, num_rows, cost, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const int64_t id = placement.Id(block_.row_part, row);
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
    const int64_t begin = block_.first_column;
    const int64_t end = begin + block_.local_dim;
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
