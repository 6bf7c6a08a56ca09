// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/lookup/table_entries.h"

#include <algorithm>

#include "custom_ops/codec/id_lists.h"
#include "custom_ops/common/radix_sort.h"
#include "custom_ops/lookup/lookup_functor.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {

using tensorflow::Tensor;
using tensorflow::errors::InvalidArgument;

absl::Status TableShapes::Read(tensorflow::OpKernelConstruction* ctx) {
  std::vector<tensorflow::TensorShape> shapes;
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_shapes", &shapes));
  for (const tensorflow::TensorShape& shape : shapes) {
    if (shape.dims() != 2) {
      return InvalidArgument(
          "table_shapes must be those of matrices. "
          "Received: ",
          shape.DebugString());
    }
    rows.push_back(shape.dim_size(0));
    widths.push_back(shape.dim_size(1));
  }
  return absl::OkStatus();
}

absl::Status FindGradBlocks(tensorflow::OpKernelContext* ctx,
                            const std::vector<int64_t>& feature_tables,
                            const std::vector<int64_t>& widths,
                            LookupBlocks* found) {
  const Tensor& grad = ctx->input(4);
  const int64_t samples = ctx->input(0).NumElements() - 1;
  TF_RETURN_IF_ERROR(
      FindLookupBlocks(samples, ctx->input(3), feature_tables, widths, found));
  if (grad.dims() != 1 || grad.NumElements() != found->values) {
    return InvalidArgument("grad must have the ", found->values,
                           " elements of Lookup's values. Received shape: ",
                           grad.shape().DebugString());
  }
  return absl::OkStatus();
}

absl::Status FindTableEntries(tensorflow::OpKernelContext* ctx,
                              const std::vector<int64_t>& feature_tables,
                              const TableShapes& shapes,
                              std::vector<TableEntries>* tables) {
  const Tensor& row_splits = ctx->input(0);
  const Tensor& rows = ctx->input(1);
  const Tensor& weights = ctx->input(2);
  TF_RETURN_IF_ERROR(
      CheckIdList(0, rows, row_splits, weights, row_splits.NumElements() - 1));
  LookupBlocks found;
  TF_RETURN_IF_ERROR(
      FindGradBlocks(ctx, feature_tables, shapes.widths, &found));
  for (size_t t = 0; t < shapes.rows.size(); ++t) {
    tables->push_back({static_cast<int64_t>(t),
                       shapes.rows[t],
                       {},
                       static_cast<const int64_t*>(row_splits.data()),
                       static_cast<const int64_t*>(rows.data()),
                       WeightsOrNull(weights)});
  }
  for (const LookupBlock& block : found.blocks) {
    TableEntries& table = (*tables)[block.table];
    table.blocks.push_back(block);
    table.count += table.Count(block);
    table.offset_bits = BitWidth(found.values);
  }
  return absl::OkStatus();
}

absl::Status RowLimit(const TableEntries& table, int64_t* limit) {
  *limit = 0;
  if (table.count == 0) return absl::OkStatus();
  uint64_t highest = 0;
  for (const LookupBlock& block : table.blocks) {
    highest = std::max(highest, HighestRow(table.rows + table.First(block),
                                           table.Count(block)));
  }
  const int64_t row = static_cast<int64_t>(highest);
  TF_RETURN_IF_ERROR(CheckRows(table.table, table.table_rows, &row, &row + 1));
  if (BitWidth(highest) + table.offset_bits > 63) {
    return InvalidArgument("rows must be in [0, 2^", 63 - table.offset_bits,
                           "). Received: ", static_cast<int64_t>(highest));
  }
  *limit = static_cast<int64_t>(highest) + 1;
  return absl::OkStatus();
}

}  // namespace tfdist
