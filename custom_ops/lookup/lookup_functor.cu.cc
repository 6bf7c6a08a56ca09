// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/common/columns.h"
#include "custom_ops/gpu/cuda_threads.h"
#include "custom_ops/lookup/lookup_functor_gpu.h"

namespace tfdist {
namespace {

// The divisor of a sum. `kind` is the same for all threads.
struct Divisor {
  Combiner kind;
  float sum = 0;

  __device__ void Add(float weight) {
    sum += kind == Combiner::kSqrtn ? weight * weight : weight;
  }

  __device__ float Finish(float value) const {
    if (kind == Combiner::kSum) return value;
    const float divisor = kind == Combiner::kSqrtn ? sqrtf(sum) : sum;
    return divisor == 0 ? 0 : value / divisor;
  }
};

// Sums some columns of one segment. The entries are added in order, so the
// results always have the same bits.
template <typename T, int kCount>
__device__ Columns<float, kCount> SumSegment(const GpuLookup& args,
                                             const GpuLookupBlock& block,
                                             int64_t segment, int64_t column) {
  const int64_t end = args.row_splits[segment + 1];
  const T* table = static_cast<const T*>(block.table) + column;
  Columns<float, kCount> sum = {};
  Divisor divisor = {args.combiner};
  for (int64_t i = args.row_splits[segment]; i < end; ++i) {
    const int64_t row = args.rows[i];
    if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(block.table_rows)) {
      continue;
    }
    const float weight = args.weights == nullptr ? 1.0f : args.weights[i];
    const auto values = LoadColumns<kCount>(table + row * block.width);
    for (int k = 0; k < kCount; ++k) sum.at[k] += weight * values.at[k];
    divisor.Add(weight);
  }
  for (int k = 0; k < kCount; ++k) sum.at[k] = divisor.Finish(sum.at[k]);
  return sum;
}

// Sums this thread's columns. The result of a segment may begin at any address.
template <typename T, int kCount>
__device__ void SumColumns(const GpuLookup& args, const GpuLookupBlock& block,
                           int64_t segment, int group) {
  float* out = block.out + (segment - block.first_segment) * block.width;
  const bool whole = IsAligned(out, 16);
  for (int64_t column = threadIdx.x % group * kCount; column < block.width;
       column += group * kCount) {
    const auto sum = SumSegment<T, kCount>(args, block, segment, column);
    if (whole) {
      StoreColumns(sum, out + column);
    } else {
      for (int k = 0; k < kCount; ++k) out[column + k] = sum.at[k];
    }
  }
}

// Uses loads of 16 bytes if all rows begin at a multiple of 16 bytes.
template <typename T>
__device__ void SumWidest(const GpuLookup& args, const GpuLookupBlock& block,
                          int64_t segment, int group) {
  constexpr int kCount = 16 / sizeof(T);
  if (block.width % kCount == 0 && IsAligned(block.table, 16)) {
    SumColumns<T, kCount>(args, block, segment, group);
  } else {
    SumColumns<T, 1>(args, block, segment, group);
  }
}

// Returns the block of a segment.
__device__ const GpuLookupBlock& BlockOf(const GpuLookup& args,
                                         int64_t segment) {
  return args.blocks[LastBegun(args.block_count, segment, [&](int64_t i) {
    return args.blocks[i].first_segment;
  })];
}

// A group of threads sums one segment at a time. Its threads sum adjacent
// columns, so that the group reads each row in one piece and threads need no
// results of others.
__global__ void LookupKernel(GpuLookup args, int group) {
  for (int64_t s = FirstUnit(group); s < args.segments;
       s += UnitStride(group)) {
    const GpuLookupBlock block = BlockOf(args, s);
    if (block.bfloat16) {
      SumWidest<Bfloat16>(args, block, s, group);
    } else {
      SumWidest<float>(args, block, s, group);
    }
  }
}

}  // namespace

int LookupGpu(const GpuLookup& args, void* stream) {
  if (args.segments == 0 || args.widest == 0) return cudaSuccess;
  constexpr int kColumns = 4;  // of a thread; eight for bfloat16
  const int group = GroupOf((args.widest + kColumns - 1) / kColumns);
  LookupKernel<<<Blocks(args.segments, group), kBlockThreads, 0,
                 StreamOf(stream)>>>(args, group);
  return cudaGetLastError();
}

}  // namespace tfdist
