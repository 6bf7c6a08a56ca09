// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "custom_ops/codec/number_codec.h"
#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/parallel_tasks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::DataLoss;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>PackNumbers")
    .Input("values: T")
    .Input("splits: int64")
    .Output("payload: uint8")
    .Output("byte_splits: int64")
    .Attr("T: {float, bfloat16, half}")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Compresses numbers for several receivers without loss; see number_codec.h.

values: [n], numbers of all receivers, ordered by receiver.
splits: [receivers], count of numbers of each receiver.
payload: messages to all receivers, in the same order.
byte_splits: [receivers], bytes of each message.
)doc");

REGISTER_OP("Tfdist>UnpackNumbers")
    .Input("payload: uint8")
    .Input("byte_splits: int64")
    .Output("values: T")
    .Output("splits: int64")
    .Attr("T: {float, bfloat16, half}")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Decompresses messages of PackNumbers.

payload: messages from several senders, ordered by sender.
byte_splits: [senders], bytes of each message.
values: [n], numbers of all senders, in the same order.
splits: [senders], count of numbers of each sender.
)doc");

constexpr int64_t kNanosecondsPerNumber = 2;

NumberFormat FormatOf(DataType dtype) {
  if (dtype == tensorflow::DT_FLOAT) return {4, 8};
  if (dtype == tensorflow::DT_BFLOAT16) return {2, 8};
  return {2, 5};
}

// Checks that `splits` are sizes that add up to `total`, one for each rank.
absl::Status CheckSplits(const Tensor& splits, int64_t total) {
  if (splits.NumElements() == 0) {
    return InvalidArgument("splits must have a size for every rank");
  }
  int64_t left = total;
  for (int64_t i = 0; i < splits.NumElements(); ++i) {
    const int64_t size = splits.vec<int64_t>()(i);
    if (size < 0 || size > left) {
      return InvalidArgument("splits[", i, "]=", size, " where ", left, " of ",
                             total, " are left");
    }
    left -= size;
  }
  if (left == 0) return absl::OkStatus();
  return InvalidArgument("splits leave ", left, " of ", total, " over");
}

class PackNumbersOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& values = ctx->input(0);
    const Tensor& splits = ctx->input(1);
    OP_REQUIRES(ctx, values.dims() == 1 && splits.dims() == 1,
                InvalidArgument("values and splits must be vectors. Received: ",
                                values.shape().DebugString(), ", ",
                                splits.shape().DebugString()));
    OP_REQUIRES_OK(ctx, CheckSplits(splits, values.NumElements()));
    const NumberFormat format = FormatOf(values.dtype());
    const int64_t receivers = splits.NumElements();
    const auto counts = splits.vec<int64_t>();
    std::vector<int64_t> first(receivers + 1, 0);
    for (int64_t i = 0; i < receivers; ++i) first[i + 1] = first[i] + counts(i);
    Tensor* byte_splits = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, splits.shape(), &byte_splits));
    auto bytes = byte_splits->vec<int64_t>();
    std::vector<std::unique_ptr<uint8_t[]>> messages(receivers);
    const auto* data = static_cast<const uint8_t*>(values.data());
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    ParallelUnits(
        pool, receivers,
        kNanosecondsPerNumber * (values.NumElements() / receivers + 1),
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            messages[i].reset(new uint8_t[MostPackedBytes(format, counts(i))]);
            bytes(i) = PackNumbers(format, data + first[i] * format.bytes,
                                   counts(i), messages[i].get()) -
                       messages[i].get();
          }
        });
    int64_t total = 0;
    for (int64_t i = 0; i < receivers; ++i) total += bytes(i);
    Tensor* payload = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {total}, &payload));
    auto* out = static_cast<uint8_t*>(payload->data());
    for (int64_t i = 0; i < receivers; ++i) {
      std::memcpy(out, messages[i].get(), bytes(i));
      out += bytes(i);
    }
  }
};

class UnpackNumbersOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& payload = ctx->input(0);
    const Tensor& byte_splits = ctx->input(1);
    OP_REQUIRES(
        ctx, payload.dims() == 1 && byte_splits.dims() == 1,
        InvalidArgument("payload and byte_splits must be vectors. Received: ",
                        payload.shape().DebugString(), ", ",
                        byte_splits.shape().DebugString()));
    OP_REQUIRES_OK(ctx, CheckSplits(byte_splits, payload.NumElements()));
    const int64_t senders = byte_splits.NumElements();
    Tensor* splits = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, byte_splits.shape(), &splits));
    const auto* data = static_cast<const uint8_t*>(payload.data());
    std::vector<const uint8_t*> blocks(senders);
    std::vector<const uint8_t*> ends(senders);
    std::vector<int64_t> first(senders + 1, 0);
    for (int64_t i = 0; i < senders; ++i) {
      const int64_t size = byte_splits.vec<int64_t>()(i);
      uint64_t count = 0;
      const char* error = ReadNumberCount(data, size, &count, &blocks[i]);
      OP_REQUIRES(ctx, error == nullptr, Malformed(i, error));
      splits->vec<int64_t>()(i) = static_cast<int64_t>(count);
      first[i + 1] = first[i] + static_cast<int64_t>(count);
      ends[i] = data += size;
    }
    Tensor* values = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {first[senders]}, &values));
    const NumberFormat format = FormatOf(values->dtype());
    auto* out = static_cast<uint8_t*>(values->data());
    std::vector<const char*> errors(senders, nullptr);
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    ParallelUnits(pool, senders,
                  kNanosecondsPerNumber * (first[senders] / senders + 1),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; ++i) {
                      errors[i] = UnpackNumbers(format, blocks[i], ends[i],
                                                first[i + 1] - first[i],
                                                out + first[i] * format.bytes);
                    }
                  });
    for (int64_t i = 0; i < senders; ++i) {
      OP_REQUIRES(ctx, errors[i] == nullptr, Malformed(i, errors[i]));
    }
  }

 private:
  static absl::Status Malformed(int64_t sender, const char* reason) {
    return DataLoss("The numbers that rank ", sender,
                    " sent cannot be unpacked: ", reason, ".");
  }
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>PackNumbers").Device(tensorflow::DEVICE_CPU), PackNumbersOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>UnpackNumbers").Device(tensorflow::DEVICE_CPU),
    UnpackNumbersOp);

}  // namespace
}  // namespace tfdist
