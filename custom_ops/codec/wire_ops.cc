// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "custom_ops/codec/round_functor.h"
#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/common/read_seed.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>RoundToWire")
    .Input("x: float")
    .Input("seed: int64")
    .Output("y: T")
    .Attr("T: {bfloat16, half}")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Rounds to 16 bits by stochastic rounding, which preserves the mean.

x: numbers of any shape.
seed: scalar. Random bits of an element depend on the seed and its index only.
y: each number rounded to one of its two neighbours in T. The nearer one has the
  higher probability. NaN and infinity are preserved. The neighbour above the
  largest finite number of T is infinity.
)doc");

class RoundToWireOp : public OpKernel {
 public:
  explicit RoundToWireOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    tensorflow::DataType dtype;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype));
    round_ =
        dtype == tensorflow::DT_BFLOAT16 ? RoundToBfloat16 : RoundToFloat16;
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    uint64_t seed = 0;
    OP_REQUIRES_OK(ctx, ReadSeed(ctx, 1, &seed));
    Tensor* y = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, x.shape(), &y));
    const auto* from = static_cast<const float*>(x.data());
    auto* to = static_cast<uint16_t*>(y->data());
    // A unit of work is one cache line of results.
    constexpr int64_t kNumbers = 16;
    const int64_t count = x.NumElements();
    ParallelTasks(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                  {{(count + kNumbers - 1) / kNumbers, 5}},
                  [&](size_t, int64_t begin, int64_t end) {
                    round_(from, seed, begin * kNumbers,
                           std::min(end * kNumbers, count), to);
                  });
  }

 private:
  void (*round_)(const float* in, uint64_t seed, int64_t begin, int64_t end,
                 uint16_t* out);
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>RoundToWire").Device(tensorflow::DEVICE_CPU), RoundToWireOp);

}  // namespace
}  // namespace tfdist
