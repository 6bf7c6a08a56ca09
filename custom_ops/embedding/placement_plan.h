// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_PLACEMENT_PLAN_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_PLACEMENT_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "custom_ops/embedding/rotated_mod.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// Columns of a table, at most. Its rows and parts: see RotatedMod.
constexpr int64_t kMaxColumns = int64_t{1} << 30;

// Where the table of a feature lies: cell (i, j) of row_parts x column_parts
// cells on ranks[i * column_parts + j].
struct FeaturePlacement {
  std::string name;
  int64_t vocabulary_size = 0;
  int64_t dim = 0;
  int64_t row_parts = 1;
  int64_t column_parts = 1;
  std::vector<int64_t> ranks;

  // Rows of one row part, padding included.
  int64_t RowLimit() const {
    return RotatedMod::LocalRows(vocabulary_size, row_parts);
  }

  // First column of a column part; of part column_parts: the end.
  int64_t FirstColumn(int64_t part) const { return part * dim / column_parts; }
};

// Where the tables of all features of an exchange lie. The ops of an exchange
// are given it as the same attributes; each reads them here, once.
class PlacementPlan {
 public:
  // What a rank holds of a feature's table, if anything.
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
  // Gives a feature its ranks: those from `next` on.
  absl::Status TakeRanks(const std::vector<int64_t>& ranks, size_t next,
                         FeaturePlacement* feature) const;
  absl::Status PlaceCells(size_t f);

  int64_t world_size_ = 1;
  std::vector<FeaturePlacement> features_;
  std::vector<Cell> cells_;  // [world_size, features]
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_PLACEMENT_PLAN_H_
