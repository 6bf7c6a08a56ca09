// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "id_codec.h"
#include "table_attrs.h"
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
using tensorflow::errors::DataLoss;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>DecodeIds")
    .Input("payload: uint8")
    .Input("splits: int64")
    .Output("row_splits: int64")
    .Output("rows: int64")
    .Output("weights: float")
    .Output("sample_splits: int64")
    .Output("samples: float")
    .Attr("rank: int >= 0")
    .Attr("world_size: int >= 1")
    .Attr("vocabulary_size: int >= 1")
    .Attr("placement: {'row', 'column'}")
    .Attr("layer: string = ''")
    .SetShapeFn([](InferenceContext* c) {
      int64_t world_size;
      TF_RETURN_IF_ERROR(c->GetAttr("world_size", &world_size));
      for (int i = 0; i < 3; ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      c->set_output(3, c->Vector(world_size));
      c->set_output(4, c->Vector(world_size));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Decodes the messages of EncodeIds that arrived from all ranks.

An error record from any rank is raised as InvalidArgument, with the same text
on all ranks; a malformed message as DataLoss.

payload: the messages, in order of the ranks they came from.
splits: [world_size], bytes from every rank.
row_splits: [S + 1], offsets of the samples, those of rank 0 first.
rows: [n], rows of this rank's shard (placement "column": of the table).
weights: [n], or [0] when all weights are 1.
sample_splits: [world_size], samples from every rank; they sum to S.
samples: [world_size], the scalar that every rank gave to EncodeIds.
)doc");

constexpr int64_t kNanosecondsPerEntry = 4;

class DecodeIdsOp : public OpKernel {
 public:
  explicit DecodeIdsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadTableAttrs(ctx, &attrs_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<MessageReader> messages(attrs_.world_size);
    OP_REQUIRES_OK(ctx, ReadHeaders(ctx, &messages));
    int64_t samples = 0;
    int64_t entries = 0;
    bool weighted = false;
    for (const MessageReader& message : messages) {
      samples += message.samples();
      entries += message.entries();
      weighted |= message.needs_weights();
    }
    Tensor* row_splits = nullptr;
    Tensor* rows = nullptr;
    Tensor* weights = nullptr;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({samples + 1}), &row_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({entries}), &rows));
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(2, TensorShape({weighted ? entries : 0}),
                                  &weights));
    OP_REQUIRES_OK(ctx, WriteRanks(ctx, messages));
    row_splits->vec<int64_t>()(0) = 0;
    OP_REQUIRES_OK(ctx, ReadEntries(ctx, messages, row_splits, rows,
                                    weighted ? weights : nullptr));
  }

 private:
  absl::Status Malformed(int64_t source, const char* reason) const {
    return DataLoss("Layer '", attrs_.layer, "': the ids that rank ", source,
                    " sent to rank ", attrs_.rank,
                    " cannot be decoded: ", reason, ".");
  }

  absl::Status ReadHeaders(OpKernelContext* ctx,
                           std::vector<MessageReader>* messages) const {
    const Tensor& payload = ctx->input(0);
    const Tensor& splits = ctx->input(1);
    if (payload.dims() != 1 || splits.dims() != 1 ||
        splits.NumElements() != attrs_.world_size) {
      return InvalidArgument(
          "payload and splits must be vectors, splits of world_size=",
          attrs_.world_size,
          " elements. Received shapes: ", payload.shape().DebugString(), ", ",
          splits.shape().DebugString());
    }
    const auto* data = static_cast<const uint8_t*>(payload.data());
    int64_t left = payload.NumElements();
    for (int64_t source = 0; source < attrs_.world_size; ++source) {
      const int64_t size = splits.vec<int64_t>()(source);
      if (size < 0 || size > left) {
        return InvalidArgument("splits[", source, "]=", size, " exceeds the ",
                               left, " bytes of payload that are left");
      }
      MessageReader& message = (*messages)[source];
      const char* error = message.ReadHeader(data, size);
      if (error != nullptr) return Malformed(source, error);
      if (message.rank() != source) {
        return Malformed(source, "it was sent by another rank");
      }
      data += size;
      left -= size;
    }
    if (left != 0) {
      return InvalidArgument("splits leave ", left, " bytes of payload over");
    }
    for (const MessageReader& message : *messages) {
      if (message.bad_id().found) {
        return BadIdError(attrs_.layer, message.rank(), message.bad_id(),
                          attrs_.vocabulary_size);
      }
    }
    return absl::OkStatus();
  }

  absl::Status WriteRanks(OpKernelContext* ctx,
                          const std::vector<MessageReader>& messages) const {
    Tensor* sample_splits = nullptr;
    Tensor* samples = nullptr;
    const TensorShape shape({attrs_.world_size});
    TF_RETURN_IF_ERROR(ctx->allocate_output(3, shape, &sample_splits));
    TF_RETURN_IF_ERROR(ctx->allocate_output(4, shape, &samples));
    for (int64_t source = 0; source < attrs_.world_size; ++source) {
      sample_splits->vec<int64_t>()(source) = messages[source].samples();
      samples->vec<float>()(source) = messages[source].samples_weight();
    }
    return absl::OkStatus();
  }

  // One message is one task: its samples and entries go to its own part of the
  // outputs.
  absl::Status ReadEntries(OpKernelContext* ctx,
                           const std::vector<MessageReader>& messages,
                           Tensor* row_splits, Tensor* rows,
                           Tensor* weights) const {
    std::vector<int64_t> first_sample;
    std::vector<int64_t> first_entry;
    int64_t samples = 0;
    int64_t entries = 0;
    for (const MessageReader& message : messages) {
      first_sample.push_back(samples);
      first_entry.push_back(entries);
      samples += message.samples();
      entries += message.entries();
    }
    auto* splits_out = static_cast<int64_t*>(row_splits->data());
    auto* rows_out = static_cast<int64_t*>(rows->data());
    auto* weights_out =
        weights == nullptr ? nullptr : static_cast<float*>(weights->data());
    std::vector<const char*> errors(messages.size(), nullptr);
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    pool->ParallelFor(
        messages.size(),
        kNanosecondsPerEntry * (entries / attrs_.world_size + 1),
        [&](int64_t first, int64_t last) {
          for (int64_t i = first; i < last; ++i) {
            errors[i] = messages[i].ReadEntries(
                attrs_.RowLimit(), first_entry[i], splits_out + first_sample[i],
                rows_out + first_entry[i],
                weights_out ? weights_out + first_entry[i] : nullptr);
          }
        });
    for (size_t source = 0; source < errors.size(); ++source) {
      if (errors[source]) return Malformed(source, errors[source]);
    }
    return absl::OkStatus();
  }

  TableAttrs attrs_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>DecodeIds").Device(tensorflow::DEVICE_CPU),
                        DecodeIdsOp);

}  // namespace
}  // namespace tfdist
