// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/common/cuda_threads.h"
#include "custom_ops/embedding/initial_rows_gpu.h"
#include "custom_ops/embedding/rotated_mod.h"

namespace tfdist {
namespace {

// A thread draws the columns of one row that share a draw: up to four, all that
// column / 4 is the same for in the whole table.
__global__ void InitRowsKernel(Block block, RotatedMod placement,
                               InitialValues values, uint64_t seed,
                               int64_t draws, float* out) {
  const int64_t end = block.first_column + block.local_dim;
  const int64_t count = block.local_rows * draws;
  for (int64_t i = FirstUnit(); i < count; i += UnitStride()) {
    const int64_t row = i / draws;
    const int64_t draw = block.first_column / 4 + i % draws;
    const int64_t id = placement.Id(block.row_part, row);
    const auto words = InitialValues::Words(seed, id, draw * 4);
    for (int k = 0; k < 4; ++k) {
      const int64_t column = draw * 4 + k;
      if (column < block.first_column || column >= end) continue;
      float* to = out + row * block.local_dim + (column - block.first_column);
      if (id >= block.rows) {
        *to = 0;
      } else if (values.distribution == Distribution::kConstant) {
        *to = values.a;
      } else {
        *to = values.Value(words[k]);
      }
    }
  }
}

}  // namespace

int InitRowsGpu(const Block& block, const InitialValues& values, uint64_t seed,
                float* out, void* stream) {
  if (block.local_rows == 0 || block.local_dim == 0) return cudaSuccess;
  const int64_t end = block.first_column + block.local_dim;
  const int64_t draws = (end + 3) / 4 - block.first_column / 4;
  InitRowsKernel<<<Blocks(block.local_rows * draws), kBlockThreads, 0,
                   StreamOf(stream)>>>(block, RotatedMod(block.row_parts),
                                       values, seed, draws, out);
  return cudaGetLastError();
}

}  // namespace tfdist
