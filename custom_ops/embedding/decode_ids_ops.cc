// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/embedding/header_bytes.h"
#include "custom_ops/embedding/id_section.h"
#include "custom_ops/embedding/message_header.h"
#include "custom_ops/embedding/placement_plan.h"
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
    .Output("served: int64")
    .Output("samples: float")
    .Attr("rank: int >= 0")
    .Attr("world_size: int >= 1")
    .Attr("features: list(string)")
    .Attr("vocabulary_sizes: list(int)")
    .Attr("dims: list(int)")
    .Attr("row_parts: list(int)")
    .Attr("column_parts: list(int)")
    .Attr("ranks: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      int64_t world_size;
      std::vector<std::string> features;
      TF_RETURN_IF_ERROR(c->GetAttr("world_size", &world_size));
      TF_RETURN_IF_ERROR(c->GetAttr("features", &features));
      for (int i = 0; i < 3; ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      c->set_output(3, c->Matrix(world_size, features.size()));
      c->set_output(4, c->Vector(world_size));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Decodes the messages of EncodeIds that arrived from all ranks.

An error record from any rank is raised as InvalidArgument, with the same text
on all ranks; a malformed message as DataLoss. The samples are in order of their
ranks, then features.

payload: the messages, in order of the ranks they came from.
splits: [world_size], bytes from every rank.
row_splits: [S + 1], offsets of the samples.
rows: [n], rows of this rank's part of the feature's table.
weights: [n], or [0] when all weights are 1.
served: [world_size, features], samples from every rank; they sum to S.
samples: [world_size], the scalar that every rank gave to EncodeIds.
features, vocabulary_sizes, dims, row_parts, column_parts, ranks: as in
  EncodeIds.
)doc");

constexpr int64_t kNanosecondsPerEntry = 4;

// One section of one message, and where its samples and entries go.
struct Part {
  int64_t source = 0;
  int64_t feature = 0;
  SectionReader reader;
  int64_t first_sample = 0;
  int64_t first_entry = 0;
  const char* error = nullptr;
};

class DecodeIdsOp : public OpKernel {
 public:
  explicit DecodeIdsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, plan_.Read(ctx));
    OP_REQUIRES_OK(ctx, plan_.ReadRank(ctx, &rank_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<MessageHeader> headers(plan_.world_size());
    std::vector<Part> parts;
    OP_REQUIRES_OK(ctx, ReadMessages(ctx, &headers, &parts));
    OP_REQUIRES_OK(ctx, WriteRanks(ctx, headers, parts));
    OP_REQUIRES_OK(ctx, WriteEntries(ctx, &parts));
  }

 private:
  // Of one message's header when `feature` is negative, else of one section.
  absl::Status Malformed(int64_t source, int64_t feature,
                         const char* reason) const {
    const std::string layer =
        feature < 0 ? std::string("The ids")
                    : "Layer '" + plan_.features()[feature].name + "': the ids";
    return DataLoss(layer, " that rank ", source, " sent to rank ", rank_,
                    " cannot be decoded: ", reason, ".");
  }

  absl::Status ReadMessages(OpKernelContext* ctx,
                            std::vector<MessageHeader>* headers,
                            std::vector<Part>* parts) const {
    const Tensor& payload = ctx->input(0);
    const Tensor& splits = ctx->input(1);
    if (payload.dims() != 1 || splits.dims() != 1 ||
        splits.NumElements() != plan_.world_size()) {
      return InvalidArgument(
          "payload and splits must be vectors, splits of world_size=",
          plan_.world_size(),
          " elements. Received shapes: ", payload.shape().DebugString(), ", ",
          splits.shape().DebugString());
    }
    const auto* data = static_cast<const uint8_t*>(payload.data());
    int64_t left = payload.NumElements();
    for (int64_t source = 0; source < plan_.world_size(); ++source) {
      const int64_t size = splits.vec<int64_t>()(source);
      if (size < 0 || size > left) {
        return InvalidArgument("splits[", source, "]=", size, " exceeds the ",
                               left, " bytes of payload that are left");
      }
      HeaderReader message(data, size);
      TF_RETURN_IF_ERROR(
          ReadMessage(source, &message, &(*headers)[source], parts));
      data += size;
      left -= size;
    }
    if (left != 0) {
      return InvalidArgument("splits leave ", left, " bytes of payload over");
    }
    return FirstBadId(*headers);
  }

  absl::Status ReadMessage(int64_t source, HeaderReader* message,
                           MessageHeader* header,
                           std::vector<Part>* parts) const {
    const char* error = header->Read(message);
    if (error != nullptr) return Malformed(source, -1, error);
    if (header->rank != source) {
      return Malformed(source, -1, "it was sent by another rank");
    }
    const int64_t features = plan_.features().size();
    for (int64_t f = 0; f < features && !header->bad_id.found; ++f) {
      if (!plan_.CellOf(f, rank_).exists) continue;
      const uint64_t size = message->Varint();
      if (!message->ok() || size > message->left()) {
        return Malformed(source, f, "it ends before its section");
      }
      parts->emplace_back();
      parts->back().source = source;
      parts->back().feature = f;
      if (size == 0) continue;
      error = parts->back().reader.ReadHeader(message->next(), size);
      if (error != nullptr) return Malformed(source, f, error);
      message->Skip(size);
    }
    if (message->left() != 0) {
      return Malformed(source, -1, "it goes on after its last section");
    }
    if (header->bad_id.feature < 0 || header->bad_id.feature >= features) {
      return Malformed(source, -1, "it reports a bad id of no feature");
    }
    return absl::OkStatus();
  }

  absl::Status FirstBadId(const std::vector<MessageHeader>& headers) const {
    for (const MessageHeader& header : headers) {
      if (!header.bad_id.found) continue;
      const FeaturePlacement& feature = plan_.features()[header.bad_id.feature];
      return BadIdError(feature.name, header.rank, header.bad_id,
                        feature.vocabulary_size);
    }
    return absl::OkStatus();
  }

  absl::Status WriteRanks(OpKernelContext* ctx,
                          const std::vector<MessageHeader>& headers,
                          const std::vector<Part>& parts) const {
    const int64_t features = plan_.features().size();
    Tensor* served = nullptr;
    Tensor* samples = nullptr;
    TF_RETURN_IF_ERROR(
        AllocateOutput(ctx, 3, {plan_.world_size(), features}, &served));
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 4, {plan_.world_size()}, &samples));
    served->matrix<int64_t>().setZero();
    for (const Part& part : parts) {
      served->matrix<int64_t>()(part.source, part.feature) =
          part.reader.samples();
    }
    for (int64_t source = 0; source < plan_.world_size(); ++source) {
      samples->vec<float>()(source) = headers[source].samples;
    }
    return absl::OkStatus();
  }

  // One section is one task: its samples and entries go to its own part of the
  // outputs.
  absl::Status WriteEntries(OpKernelContext* ctx,
                            std::vector<Part>* parts) const {
    int64_t samples = 0;
    int64_t entries = 0;
    bool weighted = false;
    for (Part& part : *parts) {
      part.first_sample = samples;
      part.first_entry = entries;
      samples += part.reader.samples();
      entries += part.reader.entries();
      weighted |= part.reader.needs_weights();
    }
    Tensor* row_splits = nullptr;
    Tensor* rows = nullptr;
    Tensor* weights = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {samples + 1}, &row_splits));
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 1, {entries}, &rows));
    TF_RETURN_IF_ERROR(
        AllocateOutput(ctx, 2, {weighted ? entries : 0}, &weights));
    auto* splits_out = static_cast<int64_t*>(row_splits->data());
    auto* rows_out = static_cast<int64_t*>(rows->data());
    auto* weights_out =
        weighted ? static_cast<float*>(weights->data()) : nullptr;
    splits_out[0] = 0;
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    const int64_t count = parts->size();
    ParallelUnits(
        pool, count,
        kNanosecondsPerEntry * (entries / std::max<int64_t>(count, 1) + 1),
        [&](int64_t first, int64_t last) {
          for (int64_t i = first; i < last; ++i) {
            Part& part = (*parts)[i];
            if (part.reader.entries() == 0) continue;
            part.error = part.reader.ReadEntries(
                plan_.features()[part.feature].RowLimit(), part.first_entry,
                splits_out + part.first_sample, rows_out + part.first_entry,
                weighted ? weights_out + part.first_entry : nullptr);
          }
        });
    for (const Part& part : *parts) {
      if (part.error) return Malformed(part.source, part.feature, part.error);
    }
    return absl::OkStatus();
  }

  PlacementPlan plan_;
  int64_t rank_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>DecodeIds").Device(tensorflow::DEVICE_CPU),
                        DecodeIdsOp);

}  // namespace
}  // namespace tfdist
