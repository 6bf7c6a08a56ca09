// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/codec/rotated_mod.h"
#include "custom_ops/common/half_float_bits.h"
#include "custom_ops/gpu/cuda_threads.h"
#include "custom_ops/lookup/initial_rows_gpu.h"

namespace tfdist {
namespace {

// Computes the columns of one row that share a draw: up to four columns, all
// those with the same column / 4 in the unpartitioned table.
template <typename Write>
__device__ void Draw(const Block& block, const InitialValues& values,
                     uint64_t seed, int64_t id, int64_t draw,
                     const Write& write) {
  const auto words = InitialValues::Words(seed, id, draw * 4);
  for (int k = 0; k < 4; ++k) {
    const int64_t column = draw * 4 + k - block.first_column;
    if (column < 0 || column >= block.local_dim) continue;
    const bool constant = values.distribution == Distribution::kConstant;
    write(column, constant ? values.a : values.Value(words[k]));
  }
}

// Each thread computes the columns of one draw.
__global__ void InitRowsKernel(Block block, RotatedMod placement,
                               InitialValues values, uint64_t seed,
                               int64_t draws, float* out) {
  const int64_t count = block.local_rows * draws;
  for (int64_t i = FirstUnit(); i < count; i += UnitStride()) {
    const int64_t row = i / draws;
    const int64_t id = placement.Id(block.row_part, row);
    float* to = out + row * block.local_dim;
    Draw(block, values, seed, id, block.first_column / 4 + i % draws,
         [&](int64_t column, float value) {
           to[column] = id >= block.rows ? 0 : value;
         });
  }
}

// Each thread computes the columns of one draw of one of the rows.
__global__ void ResetRowsKernel(Block block, InitialValues values,
                                uint64_t seed, int64_t draws,
                                const ResetRow* rows, int64_t count,
                                float* table, uint16_t* bfloat16_table) {
  for (int64_t i = FirstUnit(); i < count * draws; i += UnitStride()) {
    const ResetRow row = rows[i / draws];
    const int64_t at = row.local * block.local_dim;
    Draw(block, values, seed, row.id, block.first_column / 4 + i % draws,
         [&](int64_t column, float value) {
           if (table != nullptr) {
             table[at + column] = value;
           } else {
             bfloat16_table[at + column] = ToBfloat16(value);
           }
         });
  }
}

// Returns the number of draws of a row of the block.
int64_t DrawsOf(const Block& block) {
  const int64_t end = block.first_column + block.local_dim;
  return (end + 3) / 4 - block.first_column / 4;
}

}  // namespace

int InitRowsGpu(const Block& block, const InitialValues& values, uint64_t seed,
                float* out, void* stream) {
  if (block.local_rows == 0 || block.local_dim == 0) return cudaSuccess;
  const int64_t draws = DrawsOf(block);
  InitRowsKernel<<<Blocks(block.local_rows * draws), kBlockThreads, 0,
                   StreamOf(stream)>>>(block, RotatedMod(block.row_parts),
                                       values, seed, draws, out);
  return cudaGetLastError();
}

int ResetRowsGpu(const Block& block, const InitialValues& values, uint64_t seed,
                 const ResetRow* rows, int64_t count, float* table,
                 uint16_t* bfloat16_table, void* stream) {
  if (count == 0 || block.local_dim == 0) return cudaSuccess;
  const int64_t draws = DrawsOf(block);
  ResetRowsKernel<<<Blocks(count * draws), kBlockThreads, 0,
                    StreamOf(stream)>>>(block, values, seed, draws, rows, count,
                                        table, bfloat16_table);
  return cudaGetLastError();
}

}  // namespace tfdist
