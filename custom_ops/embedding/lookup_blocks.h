// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_BLOCKS_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_BLOCKS_H_

#include <cstdint>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// The samples that one rank asks for in one feature: a matrix [samples, width]
// within the flat values of Lookup.
struct LookupBlock {
  int64_t table;
  int64_t width;         // columns of that table
  int64_t first_sample;  // its offset is row_splits[first_sample]
  int64_t samples;
  int64_t first_value;
};

// How the samples of all ranks and features lie behind each other.
struct LookupBlocks {
  std::vector<LookupBlock> blocks;   // by rank, then feature; none is empty
  std::vector<int64_t> send_splits;  // numbers for every rank
  int64_t values = 0;                // numbers for all ranks
};

// Places the `samples` that `served` [ranks, features] tells apart.
// `feature_tables` has the table of every feature, -1 for one that this rank
// serves nothing of, `widths` the columns of every table.
absl::Status FindLookupBlocks(int64_t samples, const tensorflow::Tensor& served,
                              const std::vector<int64_t>& feature_tables,
                              const std::vector<int64_t>& widths,
                              LookupBlocks* found);

// An error if one of the rows [begin, end) is not in the table of `limit` rows.
absl::Status CheckRows(int64_t table, int64_t limit, const int64_t* begin,
                       const int64_t* end);

// Reads the attribute `feature_tables` and checks that it is below `tables`.
absl::Status ReadFeatureTables(tensorflow::OpKernelConstruction* ctx,
                               int64_t tables,
                               std::vector<int64_t>* feature_tables);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_BLOCKS_H_
