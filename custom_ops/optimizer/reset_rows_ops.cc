// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "custom_ops/embedding/initial_rows.h"
#include "custom_ops/optimizer/shard_access.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/bfloat16.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::errors::InvalidArgument;

REGISTER_OP("Tfdist>ResetRows")
    .Input("variable: resource")
    .Input("ids: int64")
    .Input("seed: int64")
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
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Gives rows of a table, or of a slot, their initial values again, in place.

variable: float32 or bfloat16, this rank's cell.
ids: rows of the whole table; those of other ranks are left alone.
seed: scalar, as for InitRows; so are the attributes.
)doc");

class ResetRowsOp : public OpKernel {
 public:
  explicit ResetRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, initial_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& ids = ctx->input(1);
    if (ids.NumElements() == 0) return;
    ShardAccess access;
    OP_REQUIRES_OK(ctx, access.Lock(ctx, 1));
    const Block& block = initial_.block();
    OP_REQUIRES(
        ctx,
        access.tensor(0).NumElements() == block.local_rows * block.local_dim,
        InvalidArgument(
            "variable ", access.name(0), " must have ", block.local_rows,
            " rows of ", block.local_dim,
            ". Received shape: ", access.tensor(0).shape().DebugString()));
    OP_REQUIRES_OK(ctx, access.PrepareToWrite(ctx));
    const auto rows = ids.flat<int64_t>();
    const uint64_t seed = ctx->input(2).flat<int64_t>()(0);
    const RotatedMod placement(block.row_parts);
    const RowBuffers buffers = access.Buffers(0, {});
    std::vector<float> row(block.local_dim);
    for (int64_t i = 0; i < rows.size(); ++i) {
      if (rows(i) < 0 || rows(i) >= block.rows) continue;
      const int64_t local = placement.LocalRow(rows(i));
      const int64_t part = placement.Owner(rows(i), local);
      if (part != block.row_part || local >= block.local_rows) continue;
      initial_.Fill(seed, rows(i), row.data());
      const int64_t at = local * block.local_dim;
      if (buffers.table) {
        std::copy(row.begin(), row.end(), buffers.table + at);
      } else {
        auto* to =
            reinterpret_cast<tensorflow::bfloat16*>(buffers.bfloat16_table);
        std::transform(row.begin(), row.end(), to + at, [](float value) {
          return static_cast<tensorflow::bfloat16>(value);
        });
      }
    }
  }

 private:
  InitialRows initial_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>ResetRows").Device(tensorflow::DEVICE_CPU),
                        ResetRowsOp);

}  // namespace
}  // namespace tfdist
