// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/codec/id_messages.h"

#include <string>

#include "custom_ops/codec/header_bytes.h"
#include "custom_ops/common/allocate_output.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::errors::DataLoss;
using tensorflow::errors::InvalidArgument;

absl::Status IdMessages::Malformed(int64_t source, int64_t feature,
                                   const char* reason) const {
  const std::string layer =
      feature < 0 ? std::string("The ids")
                  : "Layer '" + plan_.features()[feature].name + "': the ids";
  return DataLoss(layer, " that rank ", source, " sent to rank ", rank_,
                  " cannot be decoded: ", reason, ".");
}

absl::Status IdMessages::Read(OpKernelContext* ctx) {
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
  const uint8_t* next = data;
  int64_t left = payload.NumElements();
  headers_.resize(plan_.world_size());
  for (int64_t source = 0; source < plan_.world_size(); ++source) {
    const int64_t size = splits.vec<int64_t>()(source);
    if (size < 0 || size > left) {
      return InvalidArgument("splits[", source, "]=", size, " exceeds the ",
                             left, " bytes of payload that are left");
    }
    HeaderReader message(next, size);
    TF_RETURN_IF_ERROR(ReadMessage(source, data, &message));
    next += size;
    left -= size;
  }
  if (left != 0) {
    return InvalidArgument("splits leave ", left, " bytes of payload over");
  }
  return FirstBadId();
}

absl::Status IdMessages::ReadMessage(int64_t source, const uint8_t* payload,
                                     HeaderReader* message) {
  MessageHeader& header = headers_[source];
  const char* error = header.Read(message);
  if (error != nullptr) return Malformed(source, -1, error);
  if (header.rank != source) {
    return Malformed(source, -1, "it was sent by another rank");
  }
  const int64_t features = plan_.features().size();
  for (int64_t f = 0; f < features && !header.bad_id.found; ++f) {
    if (!plan_.CellOf(f, rank_).exists) continue;
    const uint64_t size = message->Varint();
    if (!message->ok() || size > message->left()) {
      return Malformed(source, f, "it ends before its section");
    }
    parts_.emplace_back();
    Part& part = parts_.back();
    part.source = source;
    part.feature = f;
    part.at = message->next() - payload;
    part.first_sample = samples_;
    part.first_entry = entries_;
    if (size == 0) continue;
    error = part.reader.ReadHeader(message->next(), size);
    if (error != nullptr) return Malformed(source, f, error);
    message->Skip(size);
    samples_ += part.reader.samples();
    entries_ += part.reader.entries();
    weighted_ |= part.reader.needs_weights();
  }
  if (message->left() != 0) {
    return Malformed(source, -1, "it goes on after its last section");
  }
  if (header.bad_id.feature < 0 || header.bad_id.feature >= features) {
    return Malformed(source, -1, "it reports a bad id of no feature");
  }
  return absl::OkStatus();
}

absl::Status IdMessages::FirstBadId() const {
  for (const MessageHeader& header : headers_) {
    if (!header.bad_id.found) continue;
    const FeaturePlacement& feature = plan_.features()[header.bad_id.feature];
    return BadIdError(feature.name, header.rank, header.bad_id,
                      feature.vocabulary_size);
  }
  return absl::OkStatus();
}

absl::Status IdMessages::WriteRanks(OpKernelContext* ctx) const {
  const int64_t features = plan_.features().size();
  Tensor* served = nullptr;
  Tensor* samples = nullptr;
  TF_RETURN_IF_ERROR(
      AllocateOutput(ctx, 3, {plan_.world_size(), features}, &served));
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 4, {plan_.world_size()}, &samples));
  served->matrix<int64_t>().setZero();
  for (const Part& part : parts_) {
    served->matrix<int64_t>()(part.source, part.feature) =
        part.reader.samples();
  }
  for (int64_t source = 0; source < plan_.world_size(); ++source) {
    samples->vec<float>()(source) = headers_[source].samples;
  }
  return absl::OkStatus();
}

absl::Status IdMessages::AllocateEntries(OpKernelContext* ctx,
                                         DecodedIds* to) const {
  Tensor* row_splits = nullptr;
  Tensor* rows = nullptr;
  Tensor* weights = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {samples_ + 1}, &row_splits));
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 1, {entries_}, &rows));
  TF_RETURN_IF_ERROR(
      AllocateOutput(ctx, 2, {weighted_ ? entries_ : 0}, &weights));
  *to = {static_cast<int64_t*>(row_splits->data()),
         static_cast<int64_t*>(rows->data()),
         weighted_ ? static_cast<float*>(weights->data()) : nullptr};
  return absl::OkStatus();
}

IdBlock IdMessages::BlockOf(const Part& part, size_t b) {
  IdBlock block = part.reader.blocks()[b];
  block.at += part.at;
  block.weights_at += part.at;
  block.first_sample += part.first_sample;
  block.first_entry += part.first_entry;
  return block;
}

}  // namespace tfdist
