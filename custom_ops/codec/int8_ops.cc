// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <vector>

#include "custom_ops/codec/int8_codec.h"
#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/parallel_tasks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::errors::DataLoss;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>EncodeInt8")
    .Input("values: float")
    .Input("splits: int64")
    .Input("seed: int64")
    .Output("payload: uint8")
    .Output("byte_splits: int64")
    .Attr("at_random: bool")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Rounds numbers for several receivers to 8 bits (see int8_codec.h).

values: [n], the numbers of receiver 0, then those of receiver 1, and so on.
splits: [receivers], how many each gets.
seed: scalar; with a number's index it determines the number's random bits.
at_random: whether to round up or down at random, so that the mean is kept.
payload: the messages in the same order.
byte_splits: [receivers], their bytes.
)doc");

REGISTER_OP("Tfdist>DecodeInt8")
    .Input("payload: uint8")
    .Input("byte_splits: int64")
    .Output("values: float")
    .Output("splits: int64")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads the messages of EncodeInt8.

payload: messages of several senders.
byte_splits: [senders], their bytes.
values: [n], the numbers of sender 0, then those of sender 1, and so on.
splits: [senders], how many came from each.
)doc");

// A unit of work is one block.
constexpr int64_t kNanosecondsPerBlock = 60;

// Checks two vectors, the second of which has sizes that add up to the length
// of the first.
absl::Status CheckSizes(const Tensor& values, const Tensor& sizes) {
  if (values.dims() != 1 || sizes.dims() != 1 || sizes.NumElements() == 0) {
    return InvalidArgument(
        "expected vectors, and a size for every rank. Received shapes: ",
        values.shape().DebugString(), ", ", sizes.shape().DebugString());
  }
  int64_t left = values.NumElements();
  for (int64_t i = 0; i < sizes.NumElements(); ++i) {
    const int64_t size = sizes.vec<int64_t>()(i);
    if (size < 0 || size > left) {
      return InvalidArgument("size ", i, " is ", size, " where ", left, " of ",
                             values.NumElements(), " are left");
    }
    left -= size;
  }
  if (left == 0) return absl::OkStatus();
  return InvalidArgument("the sizes leave ", left, " of ", values.NumElements(),
                         " over");
}

class EncodeInt8Op : public OpKernel {
 public:
  explicit EncodeInt8Op(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("at_random", &at_random_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& values = ctx->input(0);
    const Tensor& splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckSizes(values, splits));
    OP_REQUIRES(ctx, ctx->input(2).NumElements() == 1,
                InvalidArgument("seed must be a scalar. Received shape: ",
                                ctx->input(2).shape().DebugString()));
    const auto seed = static_cast<uint64_t>(
        *static_cast<const int64_t*>(ctx->input(2).data()));
    const int64_t receivers = splits.NumElements();
    Tensor* byte_splits = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, splits.shape(), &byte_splits));
    std::vector<Task> tasks(receivers);
    std::vector<int64_t> first(receivers + 1, 0);
    std::vector<int64_t> place(receivers + 1, 0);
    for (int64_t i = 0; i < receivers; ++i) {
      const int64_t count = splits.vec<int64_t>()(i);
      const auto bytes = static_cast<int64_t>(Int8Bytes(count));
      byte_splits->vec<int64_t>()(i) = bytes;
      first[i + 1] = first[i] + count;
      place[i + 1] = place[i] + bytes;
      const int64_t blocks = (bytes - count) / int64_t{kInt8ScaleBytes};
      tasks[i] = {blocks, kNanosecondsPerBlock};
    }
    Tensor* payload = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {place[receivers]}, &payload));
    const auto* from = static_cast<const float*>(values.data());
    auto* to = static_cast<uint8_t*>(payload->data());
    ParallelTasks(
        ctx->device()->tensorflow_cpu_worker_threads()->workers, tasks,
        [&](size_t i, int64_t begin, int64_t end) {
          const int64_t start = first[i] + begin * int64_t{kInt8Block};
          const int64_t stop =
              std::min(first[i] + end * int64_t{kInt8Block}, first[i + 1]);
          if (start >= stop) return;
          EncodeInt8(
              from + start, stop - start, at_random_, seed, start,
              to + place[i] + begin * int64_t{kInt8Block + kInt8ScaleBytes});
        });
  }

 private:
  bool at_random_;
};

class DecodeInt8Op : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& payload = ctx->input(0);
    const Tensor& byte_splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckSizes(payload, byte_splits));
    const int64_t senders = byte_splits.NumElements();
    Tensor* splits = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, byte_splits.shape(), &splits));
    std::vector<int64_t> first(senders + 1, 0);
    for (int64_t i = 0; i < senders; ++i) {
      const int64_t bytes = byte_splits.vec<int64_t>()(i);
      const int64_t count = Int8Count(bytes);
      OP_REQUIRES(ctx, count >= 0,
                  DataLoss("The numbers that rank ", i,
                           " sent in 8 bits cannot be read: no message has ",
                           bytes, " bytes."));
      splits->vec<int64_t>()(i) = count;
      first[i + 1] = first[i] + count;
    }
    Tensor* values = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {first[senders]}, &values));
    auto* to = static_cast<float*>(values->data());
    const auto* from = static_cast<const uint8_t*>(payload.data());
    std::vector<const uint8_t*> blocks(senders);
    for (int64_t i = 0; i < senders; ++i) {
      blocks[i] = from;
      from += byte_splits.vec<int64_t>()(i);
    }
    std::vector<const char*> errors(senders, nullptr);
    ParallelUnits(
        ctx->device()->tensorflow_cpu_worker_threads()->workers, senders,
        kNanosecondsPerBlock *
            (first[senders] / senders / int64_t{kInt8Block} + 1),
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            errors[i] =
                DecodeInt8(blocks[i], first[i + 1] - first[i], to + first[i]);
          }
        });
    for (int64_t i = 0; i < senders; ++i) {
      OP_REQUIRES(ctx, errors[i] == nullptr,
                  DataLoss("The numbers that rank ", i,
                           " sent in 8 bits cannot be read: ", errors[i], "."));
    }
  }
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>EncodeInt8").Device(tensorflow::DEVICE_CPU), EncodeInt8Op);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>DecodeInt8").Device(tensorflow::DEVICE_CPU), DecodeInt8Op);

}  // namespace
}  // namespace tfdist
