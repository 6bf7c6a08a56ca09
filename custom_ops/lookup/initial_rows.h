// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_INITIAL_ROWS_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_INITIAL_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "custom_ops/codec/placement_plan.h"
#include "custom_ops/codec/rotated_mod.h"
#include "custom_ops/lookup/initial_values.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {

template <typename Context>
absl::Status ReadBlock(Context* ctx, Block* block) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("rows", &block->rows));
  TF_RETURN_IF_ERROR(ctx->GetAttr("row_part", &block->row_part));
  TF_RETURN_IF_ERROR(ctx->GetAttr("row_parts", &block->row_parts));
  TF_RETURN_IF_ERROR(ctx->GetAttr("local_rows", &block->local_rows));
  TF_RETURN_IF_ERROR(ctx->GetAttr("first_column", &block->first_column));
  TF_RETURN_IF_ERROR(ctx->GetAttr("local_dim", &block->local_dim));
  if (block->row_part >= block->row_parts ||
      block->row_parts > RotatedMod::kMaxWorldSize ||
      block->rows > RotatedMod::kMaxRows ||
      block->local_rows >
          RotatedMod::LocalRows(block->rows, block->row_parts) ||
      block->first_column > kMaxColumns || block->local_dim > kMaxColumns) {
    return tensorflow::errors::InvalidArgument(
        "initial rows need 0 <= row_part < row_parts <= 2^20, rows <= 2^40, "
        "local_rows <= ceil(rows / row_parts), and columns <= 2^30. Received: "
        "row_part=",
        block->row_part, ", row_parts=", block->row_parts,
        ", rows=", block->rows, ", local_rows=", block->local_rows,
        ", first_column=", block->first_column,
        ", local_dim=", block->local_dim);
  }
  return absl::OkStatus();
}

// Initial values of the rows of a block. An element is a function of the row's
// id, the column and the seed.
class InitialRows {
 public:
  // Reads the attributes of `block`, "distribution", "a" and "b".
  template <typename Context>
  absl::Status Read(Context* ctx) {
    TF_RETURN_IF_ERROR(ReadBlock(ctx, &block_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("a", &values_.a));
    TF_RETURN_IF_ERROR(ctx->GetAttr("b", &values_.b));
    std::string name;
    TF_RETURN_IF_ERROR(ctx->GetAttr("distribution", &name));
    values_.distribution = name == "constant"  ? Distribution::kConstant
                           : name == "uniform" ? Distribution::kUniform
                           : name == "normal"  ? Distribution::kNormal
                                               : Distribution::kTruncatedNormal;
    return absl::OkStatus();
  }

  const Block& block() const { return block_; }
  const InitialValues& values() const { return values_; }
  // Returns the approximate time for a row, in nanoseconds.
  int64_t Cost() const {
    const bool constant = values_.distribution == Distribution::kConstant;
    return (constant ? 1 : 10) * block_.local_dim + 10;
  }

  // Computes the local columns of a row of the table.
  void Fill(uint64_t seed, int64_t id, float* out) const {
    if (values_.distribution == Distribution::kConstant) {
      std::fill_n(out, block_.local_dim, values_.a);
    } else {
      Draw(seed, id, out);
    }
  }

 private:
  void Draw(uint64_t key, int64_t id, float* out) const {
    const int64_t begin = block_.first_column;
    const int64_t end = begin + block_.local_dim;
    for (int64_t column = begin; column < end;) {
      const auto words = InitialValues::Words(key, id, column);
      const int64_t stop = std::min(end, column / 4 * 4 + 4);
      for (; column < stop; ++column) {
        *out++ = values_.Value(words[column % 4]);
      }
    }
  }

  Block block_;
  InitialValues values_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_INITIAL_ROWS_H_
