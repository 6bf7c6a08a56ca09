// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/lookup/lookup_blocks.h"

#include "custom_ops/lookup/lookup_functor.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::Tensor;
using tensorflow::errors::InvalidArgument;

// Adds the block of rank `source` and feature `f`, which requests `samples`
// samples.
absl::Status AddBlock(int64_t source, size_t f, int64_t samples, int64_t left,
                      const std::vector<int64_t>& feature_tables,
                      const std::vector<int64_t>& widths, int64_t first_sample,
                      LookupBlocks* found) {
  const int64_t table = feature_tables[f];
  if (samples < 0 || samples > left || table < 0) {
    return InvalidArgument("served[", source, ", ", f, "]=", samples,
                           " must be at least 0, at most the ", left,
                           " samples that are left, and 0 for a feature "
                           "without a table here (feature_tables[",
                           f, "]=", table, ")");
  }
  const int64_t width = widths[table];
  found->blocks.push_back({table, width, first_sample, samples, found->values});
  found->values += samples * width;
  found->send_splits[source] += samples * width;
  return absl::OkStatus();
}

}  // namespace

absl::Status FindLookupBlocks(int64_t samples, const Tensor& served,
                              const std::vector<int64_t>& feature_tables,
                              const std::vector<int64_t>& widths,
                              LookupBlocks* found) {
  const int64_t features = feature_tables.size();
  if (served.dims() != 2 || served.dim_size(1) != features) {
    return InvalidArgument(
        "served must have one column for each of the ", features,
        " features. Received shape: ", served.shape().DebugString());
  }
  const auto counts = served.matrix<int64_t>();
  found->send_splits.assign(served.dim_size(0), 0);
  int64_t next = 0;
  for (int64_t source = 0; source < served.dim_size(0); ++source) {
    for (int64_t f = 0; f < features; ++f) {
      const int64_t count = counts(source, f);
      if (count == 0) continue;
      TF_RETURN_IF_ERROR(AddBlock(source, f, count, samples - next,
                                  feature_tables, widths, next, found));
      next += count;
    }
  }
  if (next != samples) {
    return InvalidArgument("served has ", next, " samples, row_splits ",
                           samples);
  }
  return absl::OkStatus();
}

absl::Status CheckRows(int64_t table, int64_t limit, const int64_t* begin,
                       const int64_t* end) {
  const uint64_t highest = HighestRow(begin, end - begin);
  if (begin == end || highest < static_cast<uint64_t>(limit)) {
    return absl::OkStatus();
  }
  return InvalidArgument("Row ", static_cast<int64_t>(highest),
                         " is out of range: table ", table, " has ", limit,
                         " rows");
}

absl::Status ReadFeatureTables(tensorflow::OpKernelConstruction* ctx,
                               int64_t tables,
                               std::vector<int64_t>* feature_tables) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("feature_tables", feature_tables));
  for (const int64_t table : *feature_tables) {
    if (table < -1 || table >= tables) {
      return InvalidArgument(
          "feature_tables must be -1 or below the number of "
          "tables, ",
          tables, ". Received: ", table);
    }
  }
  return absl::OkStatus();
}

}  // namespace tfdist
