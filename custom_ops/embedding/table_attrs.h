// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_EMBEDDING_TABLE_ATTRS_H_
#define TFDIST_EMBEDDING_TABLE_ATTRS_H_

#include <cstdint>
#include <string>

#include "id_codec.h"
#include "placement.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {

// The attributes that the id ops share: one table, seen from one rank.
struct TableAttrs {
  int64_t rank = 0;
  int64_t world_size = 1;
  int64_t vocabulary_size = 0;
  bool row_placement = true;
  std::string layer;

  // Rows that the ids of a message address.
  int64_t RowLimit() const {
    return row_placement ? RotatedMod::LocalRows(vocabulary_size, world_size)
                         : vocabulary_size;
  }
};

inline absl::Status ReadTableAttrs(tensorflow::OpKernelConstruction* ctx,
                                   TableAttrs* attrs) {
  using tensorflow::errors::InvalidArgument;
  std::string placement;
  TF_RETURN_IF_ERROR(ctx->GetAttr("rank", &attrs->rank));
  TF_RETURN_IF_ERROR(ctx->GetAttr("world_size", &attrs->world_size));
  TF_RETURN_IF_ERROR(ctx->GetAttr("vocabulary_size", &attrs->vocabulary_size));
  TF_RETURN_IF_ERROR(ctx->GetAttr("placement", &placement));
  TF_RETURN_IF_ERROR(ctx->GetAttr("layer", &attrs->layer));
  attrs->row_placement = placement == "row";
  if (attrs->world_size > RotatedMod::kMaxWorldSize || attrs->rank < 0 ||
      attrs->rank >= attrs->world_size) {
    return InvalidArgument(
        "Attributes rank and world_size must satisfy 0 <= rank < world_size <=",
        " ", RotatedMod::kMaxWorldSize, ". Received: rank=", attrs->rank,
        ", world_size=", attrs->world_size, " (layer '", attrs->layer, "').");
  }
  if (attrs->vocabulary_size > RotatedMod::kMaxRows) {
    return InvalidArgument("Attribute vocabulary_size must be at most ",
                           RotatedMod::kMaxRows,
                           ". Received: ", attrs->vocabulary_size, " (layer '",
                           attrs->layer, "').");
  }
  return absl::OkStatus();
}

// The error for a bad id. Made from what all ranks know, so that all ranks
// raise the same text.
inline absl::Status BadIdError(const std::string& layer, int64_t rank,
                               const BadId& bad_id, int64_t vocabulary_size) {
  return tensorflow::errors::InvalidArgument(
      "Layer '", layer, "': id ", bad_id.id, " in sample ", bad_id.sample,
      " of rank ", rank, " is out of range: ids must be at least 0 and below ",
      vocabulary_size,
      ". Enlarge the layer's input_dim (the table's vocabulary_size), correct "
      "the input, or drop such ids with out_of_range='ignore'.");
}

}  // namespace tfdist

#endif  // TFDIST_EMBEDDING_TABLE_ATTRS_H_
