// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_FEATURE_GRID_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_FEATURE_GRID_H_

#include <cstdint>
#include <string>
#include <vector>

#include "custom_ops/embedding/message_header.h"
#include "custom_ops/embedding/placement.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// Where the rows of a feature's table live: cell (i, j) of row_parts x
// column_parts cells on ranks[i * column_parts + j].
struct FeatureGrid {
  std::string name;
  int64_t vocabulary_size = 0;
  int64_t row_parts = 1;
  int64_t column_parts = 1;
  std::vector<int64_t> ranks;

  // Rows of one row part.
  int64_t RowLimit() const {
    return RotatedMod::LocalRows(vocabulary_size, row_parts);
  }
};

// The features of an exchange, seen from one rank.
struct FeatureGrids {
  static constexpr int64_t kNoPart = -1;

  int64_t rank = 0;
  int64_t world_size = 1;
  std::vector<FeatureGrid> features;
  // For every feature and rank: the row part that the rank holds, or kNoPart.
  std::vector<std::vector<int64_t>> part_of_rank;
};

// Reads and checks the attributes of the id ops.
absl::Status ReadFeatureGrids(tensorflow::OpKernelConstruction* ctx,
                              FeatureGrids* grids);

// The error for a bad id. Made from what all ranks know, so that all ranks
// raise the same text.
absl::Status BadIdError(const std::string& layer, int64_t rank,
                        const BadId& bad_id, int64_t vocabulary_size);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_FEATURE_GRID_H_
