// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/huge_pages.h"
#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/common/read_seed.h"
#include "custom_ops/lookup/initial_rows.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

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
Computes the initial values of one cell of a table.

The value of element (id, column) depends only on id, column and seed, so that a
table is the same for any number of ranks and any placement. Padding rows are
zero.

seed: scalar.
block: [local rows, local columns].
a: the constant, the lower bound, or the mean.
b: unused for a constant; the upper bound, or the standard deviation.
distribution: distribution of the values. "truncated_normal" draws within two
  standard deviations of the mean.
)doc");

class InitRowsOp : public OpKernel {
 public:
  explicit InitRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, rows_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    uint64_t seed = 0;
    OP_REQUIRES_OK(ctx, ReadSeed(ctx, 0, &seed));
    const Block& block = rows_.block();
    Tensor* output = nullptr;
    OP_REQUIRES_OK(
        ctx,
        AllocateOutput(ctx, 0, {block.local_rows, block.local_dim}, &output));
    auto* data = static_cast<float*>(output->data());
    AdviseHugePages(data, output->TotalBytes());
    const RotatedMod placement(block.row_parts);
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    ParallelUnits(pool, block.local_rows, rows_.Cost(),
                  [&](int64_t first, int64_t last) {
                    for (int64_t row = first; row < last; ++row) {
                      const int64_t id = placement.Id(block.row_part, row);
                      float* out = data + row * block.local_dim;
                      if (id >= block.rows) {
                        std::fill_n(out, block.local_dim, 0.0f);
                      } else {
                        rows_.Fill(seed, id, out);
                      }
                    }
                  });
  }

 private:
  InitialRows rows_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>InitRows").Device(tensorflow::DEVICE_CPU),
                        InitRowsOp);

}  // namespace
}  // namespace tfdist
