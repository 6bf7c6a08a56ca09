// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/codec/placement_plan.h"

#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::errors::InvalidArgument;

absl::Status CheckShape(const FeaturePlacement& feature) {
  if (feature.vocabulary_size < 1 ||
      feature.vocabulary_size > RotatedMod::kMaxRows) {
    return InvalidArgument("Feature '", feature.name,
                           "': vocabulary_size must be at least 1 and at most ",
                           RotatedMod::kMaxRows,
                           ". Received: ", feature.vocabulary_size);
  }
  if (feature.dim < 0 || feature.dim > kMaxColumns) {
    return InvalidArgument("Feature '", feature.name,
                           "': dim must be at least 0 and at most ",
                           kMaxColumns, ". Received: ", feature.dim);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PlacementPlan::Read(OpKernelConstruction* ctx) {
  std::vector<int64_t> ranks;
  TF_RETURN_IF_ERROR(ctx->GetAttr("world_size", &world_size_));
  if (world_size_ < 1 || world_size_ > RotatedMod::kMaxWorldSize) {
    return InvalidArgument("world_size must be at least 1 and at most ",
                           RotatedMod::kMaxWorldSize,
                           ". Received: ", world_size_);
  }
  TF_RETURN_IF_ERROR(ReadLists(ctx, &ranks));
  cells_.resize(world_size_ * features_.size());
  size_t next = 0;
  for (size_t f = 0; f < features_.size(); ++f) {
    TF_RETURN_IF_ERROR(CheckShape(features_[f]));
    TF_RETURN_IF_ERROR(TakeRanks(ranks, next, &features_[f]));
    TF_RETURN_IF_ERROR(PlaceCells(f));
    next += features_[f].ranks.size();
  }
  if (next != ranks.size()) {
    return InvalidArgument("ranks must have one element per cell, ", next,
                           " in all. Received: ", ranks.size(), " elements");
  }
  return absl::OkStatus();
}

absl::Status PlacementPlan::ReadLists(OpKernelConstruction* ctx,
                                      std::vector<int64_t>* ranks) {
  std::vector<std::string> names;
  std::vector<int64_t> sizes, dims, row_parts, column_parts;
  TF_RETURN_IF_ERROR(ctx->GetAttr("features", &names));
  TF_RETURN_IF_ERROR(ctx->GetAttr("vocabulary_sizes", &sizes));
  TF_RETURN_IF_ERROR(ctx->GetAttr("dims", &dims));
  TF_RETURN_IF_ERROR(ctx->GetAttr("row_parts", &row_parts));
  TF_RETURN_IF_ERROR(ctx->GetAttr("column_parts", &column_parts));
  TF_RETURN_IF_ERROR(ctx->GetAttr("ranks", ranks));
  const size_t count = names.size();
  if (sizes.size() != count || dims.size() != count ||
      row_parts.size() != count || column_parts.size() != count) {
    return InvalidArgument(
        "features, vocabulary_sizes, dims, row_parts and column_parts must be ",
        "of one length. Received: ", count, ", ", sizes.size(), ", ",
        dims.size(), ", ", row_parts.size(), ", ", column_parts.size());
  }
  for (size_t f = 0; f < count; ++f) {
    features_.push_back(
        {names[f], sizes[f], dims[f], row_parts[f], column_parts[f], {}});
  }
  return absl::OkStatus();
}

absl::Status PlacementPlan::TakeRanks(const std::vector<int64_t>& ranks,
                                      size_t next,
                                      FeaturePlacement* feature) const {
  const int64_t rows = feature->row_parts;
  const int64_t columns = feature->column_parts;
  const int64_t left = ranks.size() - next;
  // Compared by division, because the product may overflow.
  if (rows < 1 || columns < 1 || rows > left || columns > left / rows) {
    return InvalidArgument("Feature '", feature->name,
                           "': row_parts and column_parts must be at least 1 ",
                           "and have a rank for each cell. Received: ", rows,
                           " x ", columns, " parts, ", left,
                           " elements of ranks that are left");
  }
  feature->ranks.assign(ranks.begin() + next,
                        ranks.begin() + next + rows * columns);
  return absl::OkStatus();
}

absl::Status PlacementPlan::PlaceCells(size_t f) {
  const FeaturePlacement& feature = features_[f];
  for (size_t i = 0; i < feature.ranks.size(); ++i) {
    const int64_t rank = feature.ranks[i];
    if (rank < 0 || rank >= world_size_ || CellOf(f, rank).exists) {
      return InvalidArgument(
          "Feature '", feature.name,
          "': ranks must be distinct and below world_size=", world_size_,
          ". Received: ", rank, " for cell ", i);
    }
    const int64_t cell = i;
    cells_[rank * features_.size() + f] = {true, cell / feature.column_parts,
                                           cell % feature.column_parts};
  }
  return absl::OkStatus();
}

absl::Status PlacementPlan::ReadRank(OpKernelConstruction* ctx,
                                     int64_t* rank) const {
  TF_RETURN_IF_ERROR(ctx->GetAttr("rank", rank));
  if (*rank < 0 || *rank >= world_size_) {
    return InvalidArgument("rank must be at least 0 and below world_size=",
                           world_size_, ". Received: ", *rank);
  }
  return absl::OkStatus();
}

}  // namespace tfdist
