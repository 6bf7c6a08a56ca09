// SPDX-License-Identifier: Apache-2.0
//
// The assignment of work to GPU threads. A group of threads processes one row.
// A group is 1 to 32 adjacent threads, a power of two, with about as many
// threads as the row has pieces.
#ifndef TFDIST_CUSTOM_OPS_GPU_CUDA_THREADS_H_
#define TFDIST_CUSTOM_OPS_GPU_CUDA_THREADS_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace tfdist {

constexpr int kBlockThreads = 256;
constexpr int kWarpThreads = 32;

// Returns the threads of a group for rows of `pieces` pieces.
inline int GroupOf(int64_t pieces) {
  int group = 1;
  while (group < kWarpThreads && group < pieces) group *= 2;
  return group;
}

// Returns the number of blocks for `units` units of work of `threads` threads
// each: at least one, and at most a limit, above which threads process several
// units.
inline unsigned Blocks(int64_t units, int threads = 1) {
  constexpr int64_t kMostBlocks = int64_t{1} << 20;
  const int64_t per_block = kBlockThreads / threads;
  const int64_t blocks = (units + per_block - 1) / per_block;
  if (blocks < 1) return 1;
  return static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

// A thread, or its group of n threads, processes the units FirstUnit(n),
// FirstUnit(n) + UnitStride(n), and so on.
__device__ inline int64_t FirstUnit(int threads = 1) {
  return (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / threads;
}

__device__ inline int64_t UnitStride(int threads = 1) {
  return int64_t{gridDim.x} * blockDim.x / threads;
}

// Returns the last of `count` items that begins at or before `place`.
// `begin_of(i)` must not decrease, and begin_of(0) must be at or before
// `place`.
template <typename BeginOf>
__device__ int64_t LastBegun(int64_t count, int64_t place,
                             const BeginOf& begin_of) {
  int64_t low = 0;
  int64_t high = count - 1;
  while (low < high) {
    const int64_t middle = high - (high - low) / 2;
    if (begin_of(middle) <= place) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__host__ __device__ inline bool IsAligned(const void* pointer,
                                          uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

inline cudaStream_t StreamOf(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_GPU_CUDA_THREADS_H_
