// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_GRAD_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_GRAD_FUNCTOR_GPU_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// Samples that looked up one table.
struct GpuGradBlock {
  int64_t table;
  int64_t first_sample;
  int64_t first_value;  // of the matrix [samples, width] within the gradient
};

// A row is a key, its own number plus the table's first_key: all tables are
// sorted at once.
struct GpuGradTable {
  int64_t first_key;
  int64_t rows;  // one from here on, or below 0, is left out
  int64_t width;
  float* row_grads;  // [unique rows of the table, width]
};

// The gradient of the pooled lookup for all tables: every row that the entries
// name, once and ascending, and the sum of weight * gradient of the sample over
// its entries. All pointers are device memory.
struct GpuRowGrads {
  const float* grad;
  const GpuGradBlock* blocks;  // ascending by first_sample, from 0 on
  int64_t block_count;
  const GpuGradTable* tables;
  int64_t table_count;
  int64_t keys;    // first_key + rows of the last table
  int64_t widest;  // width of the widest table
  // Whether all widths and first values are multiples of four and all numbers
  // begin at multiples of 16 bytes.
  bool quads;
  int64_t samples;
  const int64_t* row_splits;  // [samples + 1]
  const int64_t* rows;        // [entries]
  const float* weights;       // [entries], or nullptr when all are 1
  int64_t entries;            // at most 2^31 - 1: their positions are sorted
  int64_t* unique_rows;       // room for [entries]: of the tables in order
  // [table_count + 1]: where every table's unique rows begin; how many of all.
  int64_t* first_unique;
};

// Device memory that the two need besides, the same for both.
size_t RowGradsScratchBytes(const GpuRowGrads& args);

// Each launches on `stream`, a cudaStream_t, without waiting, and returns a
// cudaError_t. The first one writes unique_rows and first_unique, by which the
// caller gives every table its row_grads; the second one writes these.
//
// Entries are sorted by row and cut into chunks of as many, so that a frequent
// row is the work of many threads. A row within a chunk is finished there; of
// one that goes on, every chunk has a partial sum, and these are added in their
// order. The order depends on nothing else: the same bits always.
int SortRowsGpu(const GpuRowGrads& args, void* scratch, void* stream);
int SumRowGradsGpu(const GpuRowGrads& args, void* scratch, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_GRAD_FUNCTOR_GPU_H_
