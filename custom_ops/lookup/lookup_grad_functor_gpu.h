// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_GRAD_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_GRAD_FUNCTOR_GPU_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// Samples that looked up rows of one table.
struct GpuGradBlock {
  int64_t table;
  int64_t first_sample;
  int64_t first_value;  // start of the matrix [samples, width] in the gradient
};

// A table. The key of a row is its number plus the table's first_key, so that
// the rows of all tables can be sorted in one pass.
struct GpuGradTable {
  int64_t first_key;
  int64_t rows;  // entries whose row is not in [0, rows) are ignored
  int64_t width;
  float* row_grads;  // [unique rows of the table, width]
};

// The gradient of the pooled lookup for all tables: the unique rows in
// ascending order and, for each row, the sum of weight * gradient of the sample
// over its entries. All pointers are device memory.
struct GpuRowGrads {
  const float* grad;
  const GpuGradBlock* blocks;  // ascending by first_sample, from 0
  int64_t block_count;
  const GpuGradTable* tables;
  int64_t table_count;
  int64_t keys;    // first_key + rows of the last table
  int64_t widest;  // width of the widest table
  // Whether all widths and first values are multiples of four, and all arrays
  // begin at multiples of 16 bytes.
  bool quads;
  int64_t samples;
  const int64_t* row_splits;  // [samples + 1]
  const int64_t* rows;        // [entries]
  const float* weights;       // [entries], or nullptr if all are 1
  int64_t entries;       // at most 2^31 - 1, because their positions are sorted
  int64_t* unique_rows;  // memory for [entries]; table after table
  // [table_count + 1]: the index of each table's first unique row, then the
  // number of all unique rows.
  int64_t* first_unique;
};

// Returns the bytes of device memory that the two functions below share as
// scratch.
size_t RowGradsScratchBytes(const GpuRowGrads& args);

// Both functions launch on `stream`, a cudaStream_t, do not wait, and return a
// cudaError_t. SortRowsGpu writes unique_rows and first_unique. The caller uses
// these to set the row_grads of each table, which SumRowGradsGpu writes.
//
// Entries are sorted by row and divided into chunks of equal size, so that many
// threads share the work of a frequent row. A row within one chunk is summed
// there. A row that spans chunks has a partial sum in each of them, and these
// are added in the order of the chunks. The order depends on nothing else, so
// the results always have the same bits.
int SortRowsGpu(const GpuRowGrads& args, void* scratch, void* stream);
int SumRowGradsGpu(const GpuRowGrads& args, void* scratch, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_GRAD_FUNCTOR_GPU_H_
