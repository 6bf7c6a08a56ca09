// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/common/columns.h"
#include "custom_ops/common/cuda_threads.h"
#include "custom_ops/embedding/lookup_functor_gpu.h"

namespace tfdist {
namespace {

// What a sum is divided by; `kind` is the same for all threads.
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

// Some columns of one segment. Entries in their order: the same bits always.
template <typename T, int kCount>
__device__ Columns<float, kCount> SumSegment(const GpuLookup& args,
                                             int64_t segment, int64_t column) {
  const bool single = args.row_splits == nullptr;
  const int64_t end = single ? segment + 1 : args.row_splits[segment + 1];
  const T* table = static_cast<const T*>(args.table) + column;
  Columns<float, kCount> sum = {};
  Divisor divisor = {args.combiner};
  for (int64_t i = single ? segment : args.row_splits[segment]; i < end; ++i) {
    const int64_t row = args.rows[i];
    if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(args.table_rows)) {
      if (column == 0) {
        atomicMin(reinterpret_cast<unsigned long long*>(args.bad_entry),
                  static_cast<unsigned long long>(i));
      }
      continue;
    }
    const float weight = args.weights == nullptr ? 1.0f : args.weights[i];
    const auto values = LoadColumns<kCount>(table + row * args.width);
    for (int k = 0; k < kCount; ++k) sum.at[k] += weight * values.at[k];
    divisor.Add(weight);
  }
  for (int k = 0; k < kCount; ++k) sum.at[k] = divisor.Finish(sum.at[k]);
  return sum;
}

// A group of threads works on one segment at a time, each of its threads on
// kCount neighbouring columns: a row is read in one piece, sums need no others.
template <typename T, int kCount>
__global__ void LookupKernel(GpuLookup args, int64_t segments, int group) {
  const int64_t first = threadIdx.x % group * kCount;
  const int64_t stride = group * kCount;
  for (int64_t s = FirstUnit(group); s < segments; s += UnitStride(group)) {
    for (int64_t column = first; column < args.width; column += stride) {
      StoreColumns(SumSegment<T, kCount>(args, s, column),
                   args.out + s * args.width + column);
    }
  }
}

template <typename T, int kCount>
int Launch(const GpuLookup& args, int64_t segments, void* stream) {
  const int group = GroupOf((args.width + kCount - 1) / kCount);
  LookupKernel<T, kCount>
      <<<Blocks(segments, group), kBlockThreads, 0, StreamOf(stream)>>>(
          args, segments, group);
  return cudaGetLastError();
}

// Loads of 16 bytes where all rows begin at a multiple of them.
template <typename T>
int LaunchWidest(const GpuLookup& args, int64_t segments, void* stream) {
  constexpr int kCount = 16 / sizeof(T);
  const bool whole = args.width % kCount == 0 && IsAligned(args.table, 16) &&
                     IsAligned(args.out, 16);
  return whole ? Launch<T, kCount>(args, segments, stream)
               : Launch<T, 1>(args, segments, stream);
}

}  // namespace

int LookupGpu(const GpuLookup& args, int64_t segments, void* stream) {
  if (segments == 0 || args.width == 0) return cudaSuccess;
  return args.bfloat16 ? LaunchWidest<Bfloat16>(args, segments, stream)
                       : LaunchWidest<float>(args, segments, stream);
}

}  // namespace tfdist
