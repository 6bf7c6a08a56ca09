// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/embedding/feature_grid.h"

#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::errors::InvalidArgument;

// Checks one feature and notes which part every rank holds.
absl::Status PlaceParts(const FeatureGrid& grid, int64_t world_size,
                        std::vector<int64_t>* part_of_rank) {
  if (grid.vocabulary_size < 1 || grid.vocabulary_size > RotatedMod::kMaxRows) {
    return InvalidArgument(
        "vocabulary_size must be at least 1 and at most ", RotatedMod::kMaxRows,
        ". Received: ", grid.vocabulary_size, " (feature '", grid.name, "').");
  }
  part_of_rank->assign(world_size, FeatureGrids::kNoPart);
  for (size_t cell = 0; cell < grid.ranks.size(); ++cell) {
    const int64_t rank = grid.ranks[cell];
    if (rank < 0 || rank >= world_size ||
        (*part_of_rank)[rank] != FeatureGrids::kNoPart) {
      return InvalidArgument("The ranks of a feature must be distinct and ",
                             "below world_size=", world_size,
                             ". Received: ", rank, " (feature '", grid.name,
                             "').");
    }
    (*part_of_rank)[rank] = cell / grid.column_parts;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadFeatureGrids(tensorflow::OpKernelConstruction* ctx,
                              FeatureGrids* grids) {
  std::vector<std::string> names;
  std::vector<int64_t> sizes, row_parts, column_parts, ranks;
  TF_RETURN_IF_ERROR(ctx->GetAttr("rank", &grids->rank));
  TF_RETURN_IF_ERROR(ctx->GetAttr("world_size", &grids->world_size));
  TF_RETURN_IF_ERROR(ctx->GetAttr("features", &names));
  TF_RETURN_IF_ERROR(ctx->GetAttr("vocabulary_sizes", &sizes));
  TF_RETURN_IF_ERROR(ctx->GetAttr("row_parts", &row_parts));
  TF_RETURN_IF_ERROR(ctx->GetAttr("column_parts", &column_parts));
  TF_RETURN_IF_ERROR(ctx->GetAttr("ranks", &ranks));
  const int64_t world_size = grids->world_size;
  if (world_size > RotatedMod::kMaxWorldSize || grids->rank < 0 ||
      grids->rank >= world_size) {
    return InvalidArgument(
        "Attributes rank and world_size must satisfy 0 <= rank < world_size <=",
        " ", RotatedMod::kMaxWorldSize, ". Received: rank=", grids->rank,
        ", world_size=", world_size);
  }
  if (sizes.size() != names.size() || row_parts.size() != names.size() ||
      column_parts.size() != names.size()) {
    return InvalidArgument(
        "Attributes features, vocabulary_sizes, row_parts and column_parts ",
        "must be of one length. Received: ", names.size(), ", ", sizes.size(),
        ", ", row_parts.size(), ", ", column_parts.size());
  }
  grids->part_of_rank.resize(names.size());
  size_t next = 0;
  for (size_t f = 0; f < names.size(); ++f) {
    FeatureGrid grid{names[f], sizes[f], row_parts[f], column_parts[f], {}};
    const int64_t left = ranks.size() - next;
    if (grid.row_parts < 1 || grid.row_parts > left || grid.column_parts < 1 ||
        grid.column_parts > left / grid.row_parts) {
      return InvalidArgument("Feature '", names[f], "' has ", grid.row_parts,
                             " x ", grid.column_parts, " parts, but ", left,
                             " of the attribute ranks are left");
    }
    const size_t cells = grid.row_parts * grid.column_parts;
    grid.ranks.assign(ranks.begin() + next, ranks.begin() + next + cells);
    next += cells;
    TF_RETURN_IF_ERROR(PlaceParts(grid, world_size, &grids->part_of_rank[f]));
    grids->features.push_back(std::move(grid));
  }
  if (next != ranks.size()) {
    return InvalidArgument("Attribute ranks has ", ranks.size(),
                           " elements, the features have ", next, " parts");
  }
  return absl::OkStatus();
}

absl::Status BadIdError(const std::string& layer, int64_t rank,
                        const BadId& bad_id, int64_t vocabulary_size) {
  const std::string sample = bad_id.sample == BadId::kNoSample
                                 ? std::string()
                                 : absl::StrCat(" in sample ", bad_id.sample);
  return InvalidArgument(
      "Layer '", layer, "': id ", bad_id.id, sample, " of rank ", rank,
      " is out of range: ids must be at least 0 and below ", vocabulary_size,
      ". Enlarge the layer's input_dim (the table's vocabulary_size), correct "
      "the input, or drop such ids with out_of_range='ignore'.");
}

}  // namespace tfdist
