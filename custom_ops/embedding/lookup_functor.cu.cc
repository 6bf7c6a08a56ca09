// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "custom_ops/embedding/lookup_functor_gpu.h"

namespace tfdist {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

__device__ int64_t global_warp_id() {
  return (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp;
}

__device__ int64_t warp_stride() {
  return int64_t{gridDim.x} * blockDim.x / kWarp;
}

// One column of one segment.
__device__ float SumColumn(const SegmentSum& args, int64_t table_rows,
                           int64_t segment, int64_t column) {
  float sum = 0;
  const int64_t end = args.row_splits[segment + 1];
  for (int64_t i = args.row_splits[segment]; i < end; ++i) {
    const int64_t row = args.rows[i];
    if (row < 0 || row >= table_rows) continue;
    const float value = args.table[row * args.width + column];
    sum += args.weights == nullptr ? value : args.weights[i] * value;
  }
  return sum;
}

// A warp works on one segment at a time, its lanes on neighbouring columns, so
// that reads of a row are coalesced and a sum needs no other lane.
__global__ void SegmentSumKernel(SegmentSum args, int64_t table_rows,
                                 int64_t segments) {
  const int64_t lane = threadIdx.x % kWarp;
  for (int64_t s = global_warp_id(); s < segments; s += warp_stride()) {
    for (int64_t column = lane; column < args.width; column += kWarp) {
      args.out[s * args.width + column] =
          SumColumn(args, table_rows, s, column);
    }
  }
}

// Enough blocks for one warp per segment, at most what the grid stride covers.
int GridSize(int64_t segments) {
  constexpr int64_t kMostBlocks = 1 << 16;
  const int64_t blocks = (segments * kWarp + kThreads - 1) / kThreads;
  return static_cast<int>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

}  // namespace
}  // namespace tfdist

int TfdistSegmentSumGpu(const tfdist::SegmentSum* args, int64_t table_rows,
                        int64_t segments, void* stream) {
  if (segments == 0 || args->width == 0) return cudaSuccess;
  tfdist::SegmentSumKernel<<<tfdist::GridSize(segments), tfdist::kThreads, 0,
                             static_cast<cudaStream_t>(stream)>>>(
      *args, table_rows, segments);
  return cudaGetLastError();
}
