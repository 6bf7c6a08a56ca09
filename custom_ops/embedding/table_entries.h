// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_TABLE_ENTRIES_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_TABLE_ENTRIES_H_

#include <cstdint>
#include <vector>

#include "custom_ops/embedding/lookup_blocks.h"

namespace tfdist {

// What Lookup was given for one table: sample s of a block has the entries
// row_splits[s] .. row_splits[s + 1].
struct TableEntries {
  std::vector<LookupBlock> blocks;
  const int64_t* row_splits;
  const int64_t* rows;
  const float* weights;  // nullptr when all are 1
  int64_t count = 0;     // entries of all blocks
  int offset_bits = 0;   // enough for an offset within the values

  int64_t First(const LookupBlock& block) const {
    return row_splits[block.first_sample];
  }
  int64_t Count(const LookupBlock& block) const {
    return row_splits[block.first_sample + block.samples] - First(block);
  }
};

// Reads and checks the inputs of LookupGrad: the entries of every table.
absl::Status FindTableEntries(tensorflow::OpKernelContext* ctx,
                              const std::vector<int64_t>& feature_tables,
                              const std::vector<int64_t>& widths,
                              std::vector<TableEntries>* tables);

// One more than the highest row; 0 without entries. An error for a negative
// one, or if a row and an offset do not fit into a word together.
absl::Status RowLimit(const TableEntries& table, int64_t* limit);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_TABLE_ENTRIES_H_
