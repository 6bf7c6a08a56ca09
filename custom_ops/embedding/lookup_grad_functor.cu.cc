// SPDX-License-Identifier: Apache-2.0
#include <cub/cub.cuh>

#include "custom_ops/common/columns.h"
#include "custom_ops/common/cuda_threads.h"
#include "custom_ops/embedding/lookup_grad_functor_gpu.h"

namespace tfdist {
namespace {

constexpr int64_t kChunk = 64;  // entries

// Entries by row. Those of no row of the table have row table_rows: they come
// last, and are skipped.
struct Sorted {
  uint64_t* rows;     // [entries], ascending
  uint32_t* entries;  // [entries], ascending within a row
  uint32_t* samples;  // [entries], of unsorted entries
  uint32_t* ordinal;  // [entries]: which of the unique rows, from 1 on
  float* before;      // [chunks, width]: of a row that began in another chunk
  float* after;       // [chunks, width]: of one that begins here and goes on
};

__device__ bool Begins(const uint64_t* rows, int64_t i) {
  return i == 0 || rows[i - 1] != rows[i];
}

// A thread prepares one entry: its row as a key, its position, and its sample,
// the last one that begins at or before it.
__global__ void KeysKernel(GpuRowGrads args, uint64_t* keys,
                           uint32_t* positions, uint32_t* samples) {
  for (int64_t i = FirstUnit(); i < args.entries; i += UnitStride()) {
    const uint64_t row = args.rows[i];
    const uint64_t limit = args.table_rows;
    keys[i] = row < limit ? row : limit;
    positions[i] = static_cast<uint32_t>(i);
    int64_t low = args.row_splits == nullptr ? i : 0;
    int64_t high = args.row_splits == nullptr ? i : args.samples - 1;
    while (low < high) {
      const int64_t middle = high - (high - low) / 2;
      if (args.row_splits[middle] <= i) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    samples[i] = static_cast<uint32_t>(low);
  }
}

// A thread marks one entry: 1 where a row of the table begins.
__global__ void MarkKernel(GpuRowGrads args, const uint64_t* rows,
                           uint32_t* marks) {
  const uint64_t limit = args.table_rows;
  for (int64_t i = FirstUnit(); i < args.entries; i += UnitStride()) {
    marks[i] = rows[i] < limit && Begins(rows, i) ? 1 : 0;
  }
}

// A thread writes the row that begins at one entry; the last entry knows how
// many there are.
__global__ void UniqueKernel(GpuRowGrads args, Sorted sorted) {
  const uint64_t limit = args.table_rows;
  for (int64_t i = FirstUnit(); i < args.entries; i += UnitStride()) {
    if (sorted.rows[i] < limit && Begins(sorted.rows, i)) {
      args.unique_rows[sorted.ordinal[i] - 1] = sorted.rows[i];
    }
    if (i == args.entries - 1) *args.unique = sorted.ordinal[i];
  }
}

// Some columns of one chunk: a sum is stored where its row ends, or the chunk.
template <int kCount>
__device__ void SumChunk(const GpuRowGrads& args, const Sorted& sorted,
                         int64_t chunk, int64_t column) {
  const int64_t begin = chunk * kChunk;
  const int64_t end =
      begin + kChunk < args.entries ? begin + kChunk : args.entries;
  const uint64_t limit = args.table_rows;
  bool began_before = !Begins(sorted.rows, begin);
  Columns<float, kCount> sum = {};
  for (int64_t i = begin; i < end && sorted.rows[i] < limit; ++i) {
    const uint32_t entry = sorted.entries[i];
    const float weight = args.weights == nullptr ? 1.0f : args.weights[entry];
    const auto values = LoadColumns<kCount>(
        args.grad + int64_t{sorted.samples[entry]} * args.width + column);
    for (int k = 0; k < kCount; ++k) sum.at[k] += weight * values.at[k];
    const bool ends = i + 1 == args.entries || Begins(sorted.rows, i + 1);
    if (!ends && i + 1 < end) continue;
    float* to = args.row_grads + int64_t{sorted.ordinal[i] - 1} * args.width;
    if (began_before) {
      to = sorted.before + chunk * args.width;
    } else if (!ends) {
      to = sorted.after + chunk * args.width;
    }
    StoreColumns(sum, to + column);
    sum = {};
    began_before = false;
  }
}

// A group of threads works on one chunk of entries at a time, each of its
// threads on kCount neighbouring columns.
template <int kCount>
__global__ void ChunksKernel(GpuRowGrads args, Sorted sorted, int64_t chunks,
                             int group) {
  const int64_t first = threadIdx.x % group * kCount;
  for (int64_t c = FirstUnit(group); c < chunks; c += UnitStride(group)) {
    for (int64_t column = first; column < args.width;
         column += group * kCount) {
      SumChunk<kCount>(args, sorted, c, column);
    }
  }
}

// The last entry of the row that goes on after a chunk's last entry, if that
// row begins in the chunk; else -1.
__device__ int64_t EndOfRow(const GpuRowGrads& args, const Sorted& sorted,
                            int64_t chunk) {
  const int64_t end = (chunk + 1) * kChunk;
  if (end >= args.entries || Begins(sorted.rows, end)) return -1;
  const uint64_t row = sorted.rows[end];
  const int64_t begin = chunk * kChunk;
  const bool spans = sorted.rows[begin] == row && !Begins(sorted.rows, begin);
  if (row >= static_cast<uint64_t>(args.table_rows) || spans) return -1;
  int64_t low = end;
  int64_t high = args.entries - 1;
  while (low < high) {
    const int64_t middle = high - (high - low) / 2;
    if (sorted.rows[middle] == row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// A block adds the partial sums of the row that begins in its chunk and goes
// on: each of its groups every so many chunks, then the first one all groups.
template <int kCount>
__global__ void JoinKernel(GpuRowGrads args, Sorted sorted, int64_t chunks,
                           int group) {
  __shared__ Columns<float, kCount> partial[kBlockThreads];
  const int groups = kBlockThreads / group;
  const int mine = threadIdx.x / group;
  for (int64_t c = blockIdx.x; c < chunks; c += gridDim.x) {
    const int64_t last = EndOfRow(args, sorted, c);
    if (last < 0) continue;
    for (int64_t from = 0; from < args.width; from += group * kCount) {
      const int64_t column = from + threadIdx.x % group * kCount;
      Columns<float, kCount> sum = {};
      for (int64_t p = c + mine; p <= last / kChunk && column < args.width;
           p += groups) {
        const float* part = p == c ? sorted.after : sorted.before;
        const auto values = LoadColumns<kCount>(part + p * args.width + column);
        for (int k = 0; k < kCount; ++k) sum.at[k] += values.at[k];
      }
      partial[threadIdx.x] = sum;
      __syncthreads();
      if (mine == 0 && column < args.width) {
        for (int g = 1; g < groups; ++g) {
          for (int k = 0; k < kCount; ++k) {
            sum.at[k] += partial[threadIdx.x + g * group].at[k];
          }
        }
        const int64_t row = sorted.ordinal[last] - 1;
        StoreColumns(sum, args.row_grads + row * args.width + column);
      }
      __syncthreads();
    }
  }
}

int64_t ChunksOf(const GpuRowGrads& args) {
  return (args.entries + kChunk - 1) / kChunk;
}

// Bits of the keys: those of rows, and of table_rows itself.
int KeyBits(const GpuRowGrads& args) {
  int bits = 1;
  while (bits < 63 && args.table_rows >> bits != 0) ++bits;
  return bits;
}

// The scratch memory in pieces that begin at multiples of 256 bytes.
struct Scratch {
  Sorted sorted;
  uint64_t* keys;
  uint32_t* positions;
  void* cub;
  size_t cub_bytes;
  size_t bytes;
};

template <typename T>
T* Take(size_t count, char* begin, size_t* bytes) {
  auto* piece = reinterpret_cast<T*>(begin + *bytes);
  *bytes += (count * sizeof(T) + 255) / 256 * 256;
  return piece;
}

int CubSort(const GpuRowGrads& args, const Scratch& at, void* cub,
            size_t* bytes, cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(
      cub, *bytes, at.keys, at.sorted.rows, at.positions, at.sorted.entries,
      static_cast<int>(args.entries), 0, KeyBits(args), stream);
}

// Of marks, in the place of the positions that are sorted by then.
int CubCount(const GpuRowGrads& args, const Scratch& at, void* cub,
             size_t* bytes, cudaStream_t stream) {
  return cub::DeviceScan::InclusiveSum(cub, *bytes, at.positions,
                                       at.sorted.ordinal,
                                       static_cast<int>(args.entries), stream);
}

Scratch Divide(const GpuRowGrads& args, char* begin) {
  Scratch at = {};
  const size_t partial = ChunksOf(args) * args.width;
  at.sorted.rows = Take<uint64_t>(args.entries, begin, &at.bytes);
  at.sorted.entries = Take<uint32_t>(args.entries, begin, &at.bytes);
  at.sorted.samples = Take<uint32_t>(args.entries, begin, &at.bytes);
  at.sorted.ordinal = Take<uint32_t>(args.entries, begin, &at.bytes);
  at.sorted.before = Take<float>(partial, begin, &at.bytes);
  at.sorted.after = Take<float>(partial, begin, &at.bytes);
  at.keys = Take<uint64_t>(args.entries, begin, &at.bytes);
  at.positions = Take<uint32_t>(args.entries, begin, &at.bytes);
  size_t count_bytes = 0;
  CubSort(args, at, nullptr, &at.cub_bytes, nullptr);
  CubCount(args, at, nullptr, &count_bytes, nullptr);
  if (count_bytes > at.cub_bytes) at.cub_bytes = count_bytes;
  at.cub = Take<char>(at.cub_bytes, begin, &at.bytes);
  return at;
}

template <int kCount>
int SumSorted(const GpuRowGrads& args, const Sorted& sorted,
              cudaStream_t stream) {
  const int64_t chunks = ChunksOf(args);
  const int group = GroupOf((args.width + kCount - 1) / kCount);
  ChunksKernel<kCount><<<Blocks(chunks, group), kBlockThreads, 0, stream>>>(
      args, sorted, chunks, group);
  JoinKernel<kCount>
      <<<Blocks(chunks, kBlockThreads), kBlockThreads, 0, stream>>>(
          args, sorted, chunks, group);
  return cudaGetLastError();
}

}  // namespace

size_t RowGradsScratchBytes(const GpuRowGrads& args) {
  return Divide(args, nullptr).bytes;
}

int RowGradsGpu(const GpuRowGrads& args, void* scratch, void* stream_pointer) {
  const cudaStream_t stream = StreamOf(stream_pointer);
  if (args.entries == 0) {
    return cudaMemsetAsync(args.unique, 0, sizeof(*args.unique), stream);
  }
  Scratch at = Divide(args, static_cast<char*>(scratch));
  const unsigned blocks = Blocks(args.entries);
  KeysKernel<<<blocks, kBlockThreads, 0, stream>>>(args, at.keys, at.positions,
                                                   at.sorted.samples);
  int error = CubSort(args, at, at.cub, &at.cub_bytes, stream);
  if (error != cudaSuccess) return error;
  MarkKernel<<<blocks, kBlockThreads, 0, stream>>>(args, at.sorted.rows,
                                                   at.positions);
  error = CubCount(args, at, at.cub, &at.cub_bytes, stream);
  if (error != cudaSuccess) return error;
  UniqueKernel<<<blocks, kBlockThreads, 0, stream>>>(args, at.sorted);
  if (args.width == 0) return cudaGetLastError();
  const bool whole = args.width % 4 == 0 && IsAligned(args.grad, 16) &&
                     IsAligned(args.row_grads, 16);
  return whole ? SumSorted<4>(args, at.sorted, stream)
               : SumSorted<1>(args, at.sorted, stream);
}

}  // namespace tfdist
