// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_PLACEMENT_PLAN_H_
#define TFDIST_CUSTOM_OPS_CODEC_PLACEMENT_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "custom_ops/codec/rotated_mod.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// The limit of columns of a table. For the limits of rows and parts, see
// RotatedMod.
constexpr int64_t kMaxColumns = int64_t{1} << 30;

// The placement of a feature's table. Cell (i, j) of row_parts x column_parts
// cells is on ranks[i * column_parts + j].
struct FeaturePlacement {
  std::string name;
  int64_t vocabulary_size = 0;
  int64_t dim = 0;
  int64_t row_parts = 1;
  int64_t column_parts = 1;
  std::vector<int64_t> ranks;

  // Returns the rows of one row part, including padding.
  int64_t RowLimit() const {
    return RotatedMod::LocalRows(vocabulary_size, row_parts);
  }

  // Returns the first column of a column part. `part` may be column_parts, for
  // the end.
  int64_t FirstColumn(int64_t part) const { return part * dim / column_parts; }
};

// The placements of the tables of all features of an exchange. All ops of an
// exchange have them as the same attributes, which each op reads once.
class PlacementPlan {
 public:
  // The cell of a feature's table that a rank holds, if any.
  struct Cell {
    bool exists = false;
    int64_t row_part = 0;
    int64_t column_part = 0;
  };

  // Reads and checks the attributes world_size, features, vocabulary_sizes,
  // dims, row_parts, column_parts and ranks.
  absl::Status Read(tensorflow::OpKernelConstruction* ctx);

  // Reads and checks the attribute rank, which only some ops have.
  absl::Status ReadRank(tensorflow::OpKernelConstruction* ctx,
                        int64_t* rank) const;

  int64_t world_size() const { return world_size_; }
  const std::vector<FeaturePlacement>& features() const { return features_; }

  const Cell& CellOf(int64_t feature, int64_t rank) const {
    return cells_[rank * features_.size() + feature];
  }

 private:
  absl::Status ReadLists(tensorflow::OpKernelConstruction* ctx,
                         std::vector<int64_t>* ranks);
  // Sets the ranks of a feature, which start at index `next`.
  absl::Status TakeRanks(const std::vector<int64_t>& ranks, size_t next,
                         FeaturePlacement* feature) const;
  absl::Status PlaceCells(size_t f);

  int64_t world_size_ = 1;
  std::vector<FeaturePlacement> features_;
  std::vector<Cell> cells_;  // [world_size, features]
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_PLACEMENT_PLAN_H_
