// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_TABLE_ENTRIES_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_TABLE_ENTRIES_H_

#include <cstdint>
#include <vector>

#include "custom_ops/lookup/lookup_blocks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// The attribute table_shapes: [rows, width] of each table.
struct TableShapes {
  std::vector<int64_t> rows;
  std::vector<int64_t> widths;

  absl::Status Read(tensorflow::OpKernelConstruction* ctx);
};

// The inputs of Lookup for one table. Sample s of a block has the entries
// row_splits[s] .. row_splits[s + 1].
struct TableEntries {
  int64_t table = 0;
  int64_t table_rows = 0;
  std::vector<LookupBlock> blocks;
  const int64_t* row_splits;
  const int64_t* rows;
  const float* weights;  // nullptr if all are 1
  int64_t count = 0;     // entries of all blocks
  int offset_bits = 0;   // bits of an offset in the values

  int64_t First(const LookupBlock& block) const {
    return row_splits[block.first_sample];
  }
  int64_t Count(const LookupBlock& block) const {
    return row_splits[block.first_sample + block.samples] - First(block);
  }
};

// Divides the samples of LookupGrad's inputs into blocks, and checks the size
// of `grad`. The entries may be in host or device memory.
absl::Status FindGradBlocks(tensorflow::OpKernelContext* ctx,
                            const std::vector<int64_t>& feature_tables,
                            const std::vector<int64_t>& widths,
                            LookupBlocks* found);

// Reads and checks the inputs of LookupGrad in host memory: the entries of each
// table.
absl::Status FindTableEntries(tensorflow::OpKernelContext* ctx,
                              const std::vector<int64_t>& feature_tables,
                              const TableShapes& shapes,
                              std::vector<TableEntries>* tables);

// Sets `limit` to one more than the highest row, or to 0 without entries.
// Returns an error if a row is not in the table, or if a row and an offset do
// not fit into one 64-bit word.
absl::Status RowLimit(const TableEntries& table, int64_t* limit);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_TABLE_ENTRIES_H_
