// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_BLOCKS_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_BLOCKS_H_

#include <cstdint>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// The samples that one rank requests for one feature: a matrix [samples, width]
// in the flat values of Lookup.
struct LookupBlock {
  int64_t table;
  int64_t width;         // columns of the table
  int64_t first_sample;  // its entries start at row_splits[first_sample]
  int64_t samples;
  int64_t first_value;
};

// The order of the samples of all ranks and features.
struct LookupBlocks {
  std::vector<LookupBlock> blocks;   // by rank, then feature; no block is empty
  std::vector<int64_t> send_splits;  // numbers for each rank
  int64_t values = 0;                // numbers for all ranks
};

// Divides `samples` samples into blocks. `served` [ranks, features]: the
// samples of each block. `feature_tables`: the table of each feature, -1 if
// this rank holds no cell of it. `widths`: the columns of each table.
absl::Status FindLookupBlocks(int64_t samples, const tensorflow::Tensor& served,
                              const std::vector<int64_t>& feature_tables,
                              const std::vector<int64_t>& widths,
                              LookupBlocks* found);

// Returns an error if one of the rows [begin, end) is not in the table, which
// has `limit` rows.
absl::Status CheckRows(int64_t table, int64_t limit, const int64_t* begin,
                       const int64_t* end);

// Reads the attribute `feature_tables` and checks that its values are below
// `tables`.
absl::Status ReadFeatureTables(tensorflow::OpKernelConstruction* ctx,
                               int64_t tables,
                               std::vector<int64_t>* feature_tables);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_BLOCKS_H_
