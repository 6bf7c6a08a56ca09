// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/embedding/table_entries.h"

#include <algorithm>

#include "custom_ops/common/radix_sort.h"
#include "custom_ops/embedding/id_lists.h"
#include "custom_ops/embedding/lookup_functor.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {

using tensorflow::Tensor;
using tensorflow::errors::InvalidArgument;

absl::Status FindTableEntries(tensorflow::OpKernelContext* ctx,
                              const std::vector<int64_t>& feature_tables,
                              const std::vector<int64_t>& widths,
                              std::vector<TableEntries>* tables) {
  const Tensor& weights = ctx->input(2);
  const Tensor& grad = ctx->input(4);
  const int64_t samples = ctx->input(0).NumElements() - 1;
  TF_RETURN_IF_ERROR(
      CheckIdList(0, ctx->input(1), ctx->input(0), weights, samples));
  LookupBlocks found;
  TF_RETURN_IF_ERROR(
      FindLookupBlocks(samples, ctx->input(3), feature_tables, widths, &found));
  if (grad.dims() != 1 || grad.NumElements() != found.values) {
    return InvalidArgument("grad must have the ", found.values,
                           " elements of Lookup's values. Received shape: ",
                           grad.shape().DebugString());
  }
  const TableEntries none = {{},
                             static_cast<const int64_t*>(ctx->input(0).data()),
                             static_cast<const int64_t*>(ctx->input(1).data()),
                             WeightsOrNull(weights)};
  tables->assign(widths.size(), none);
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
  if (BitWidth(highest) + table.offset_bits > 63) {
    return InvalidArgument("rows must be in [0, 2^", 63 - table.offset_bits,
                           "). Received: ", static_cast<int64_t>(highest));
  }
  *limit = static_cast<int64_t>(highest) + 1;
  return absl::OkStatus();
}

}  // namespace tfdist
