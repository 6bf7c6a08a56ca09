// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_TABLE_ENTRIES_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_TABLE_ENTRIES_H_

#include <cstdint>
#include <vector>

#include "custom_ops/embedding/lookup_blocks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// The attribute table_shapes, [rows, width] of every table.
struct TableShapes {
  std::vector<int64_t> rows;
  std::vector<int64_t> widths;

  absl::Status Read(tensorflow::OpKernelConstruction* ctx);
};

// What Lookup was given for one table: sample s of a block has the entries
// row_splits[s] .. row_splits[s + 1].
struct TableEntries {
  int64_t table = 0;
  int64_t table_rows = 0;
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

// Places the samples of LookupGrad's inputs, wherever the entries lie, and
// checks that `grad` has their numbers.
absl::Status FindGradBlocks(tensorflow::OpKernelContext* ctx,
                            const std::vector<int64_t>& feature_tables,
                            const std::vector<int64_t>& widths,
                            LookupBlocks* found);

// Reads and checks the inputs of LookupGrad on the host: the entries of every
// table.
absl::Status FindTableEntries(tensorflow::OpKernelContext* ctx,
                              const std::vector<int64_t>& feature_tables,
                              const TableShapes& shapes,
                              std::vector<TableEntries>* tables);

// One more than the highest row; 0 without entries. An error for one that is
// not in the table, or if a row and an offset do not fit into a word together.
absl::Status RowLimit(const TableEntries& table, int64_t* limit);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_TABLE_ENTRIES_H_
