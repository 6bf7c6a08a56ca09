// SPDX-License-Identifier: Apache-2.0
#include <cub/cub.cuh>

#include "custom_ops/common/columns.h"
#include "custom_ops/gpu/cuda_threads.h"
#include "custom_ops/lookup/lookup_grad_functor_gpu.h"

namespace tfdist {
namespace {

constexpr int64_t kChunk = 64;  // entries

// Entries sorted by key. Entries whose row is not in their table have the key
// args.keys. They come last and are skipped.
struct Sorted {
  uint64_t* keys;     // [entries], ascending
  uint32_t* entries;  // [entries], ascending within a key
  uint64_t* values;   // [entries], by unsorted entry: offset of its gradient
  uint32_t* ordinal;  // [entries]: number of the unique key, from 1
  // [chunks, widest]: sum of a row that began in an earlier chunk.
  float* before;
  // [chunks, widest]: sum of a row that begins here and continues.
  float* after;
};

__device__ bool Begins(const uint64_t* keys, int64_t i) {
  return i == 0 || keys[i - 1] != keys[i];
}

// Returns the table of a key. Of tables with the same first_key, this is the
// last, because only it has rows.
__device__ int64_t TableOf(const GpuRowGrads& args, uint64_t key) {
  return LastBegun(args.table_count, static_cast<int64_t>(key),
                   [&](int64_t t) { return args.tables[t].first_key; });
}

// Each thread prepares one entry: its key, its position, and the offset of the
// gradient of its sample.
__global__ void KeysKernel(GpuRowGrads args, uint64_t* keys,
                           uint32_t* positions, uint64_t* values) {
  for (int64_t i = FirstUnit(); i < args.entries; i += UnitStride()) {
    const int64_t sample = LastBegun(
        args.samples, i, [&](int64_t s) { return args.row_splits[s]; });
    const GpuGradBlock block =
        args.blocks[LastBegun(args.block_count, sample, [&](int64_t b) {
          return args.blocks[b].first_sample;
        })];
    const GpuGradTable table = args.tables[block.table];
    const uint64_t row = args.rows[i];
    const bool inside = row < static_cast<uint64_t>(table.rows);
    keys[i] = inside ? table.first_key + row : args.keys;
    positions[i] = static_cast<uint32_t>(i);
    values[i] = block.first_value + (sample - block.first_sample) * table.width;
  }
}

// Each thread sets the mark of one entry: 1 if a row of a table begins there.
__global__ void MarkKernel(GpuRowGrads args, const uint64_t* keys,
                           uint32_t* marks) {
  const uint64_t limit = args.keys;
  for (int64_t i = FirstUnit(); i < args.entries; i += UnitStride()) {
    marks[i] = keys[i] < limit && Begins(keys, i) ? 1 : 0;
  }
}

// Each thread writes the row that begins at one entry, if one does.
__global__ void UniqueKernel(GpuRowGrads args, Sorted sorted) {
  const uint64_t limit = args.keys;
  for (int64_t i = FirstUnit(); i < args.entries; i += UnitStride()) {
    const uint64_t key = sorted.keys[i];
    if (key >= limit || !Begins(sorted.keys, i)) continue;
    args.unique_rows[sorted.ordinal[i] - 1] =
        key - args.tables[TableOf(args, key)].first_key;
  }
}

// Each thread counts the unique rows before one table. The last thread counts
// the unique rows of all tables.
__global__ void FirstsKernel(GpuRowGrads args, Sorted sorted) {
  for (int64_t t = FirstUnit(); t <= args.table_count; t += UnitStride()) {
    const uint64_t key =
        t < args.table_count ? args.tables[t].first_key : args.keys;
    int64_t low = 0;  // the first entry whose key is at least `key`
    int64_t high = args.entries;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (sorted.keys[middle] < key) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    args.first_unique[t] = low == 0 ? 0 : sorted.ordinal[low - 1];
  }
}

// Returns the output for the sum of an entry's row.
__device__ float* RowGradOf(const GpuRowGrads& args, const Sorted& sorted,
                            int64_t table, int64_t entry) {
  const int64_t row = sorted.ordinal[entry] - 1 - args.first_unique[table];
  return args.tables[table].row_grads + row * args.tables[table].width;
}

// Sums some columns of one chunk. A sum is stored at the end of its row or of
// the chunk.
template <int kCount>
__device__ void SumChunk(const GpuRowGrads& args, const Sorted& sorted,
                         int64_t chunk, int64_t column) {
  const int64_t begin = chunk * kChunk;
  const int64_t end =
      begin + kChunk < args.entries ? begin + kChunk : args.entries;
  const uint64_t limit = args.keys;
  bool began_before = !Begins(sorted.keys, begin);
  int64_t table = -1;
  Columns<float, kCount> sum = {};
  for (int64_t i = begin; i < end && sorted.keys[i] < limit; ++i) {
    if (i == begin || Begins(sorted.keys, i)) {
      table = TableOf(args, sorted.keys[i]);
    }
    const bool ends = i + 1 == args.entries || Begins(sorted.keys, i + 1);
    if (column < args.tables[table].width) {
      const uint32_t entry = sorted.entries[i];
      const float weight = args.weights == nullptr ? 1.0f : args.weights[entry];
      const auto values =
          LoadColumns<kCount>(args.grad + sorted.values[entry] + column);
      for (int k = 0; k < kCount; ++k) sum.at[k] += weight * values.at[k];
      if (!ends && i + 1 < end) continue;
      float* to = sorted.before + chunk * args.widest;
      if (!began_before) {
        to = ends ? RowGradOf(args, sorted, table, i)
                  : sorted.after + chunk * args.widest;
      }
      StoreColumns(sum, to + column);
    }
    if (!ends) continue;
    sum = {};
    began_before = false;
  }
}

// A group of threads sums one chunk of entries at a time. Each thread sums
// kCount adjacent columns.
template <int kCount>
__global__ void ChunksKernel(GpuRowGrads args, Sorted sorted, int64_t chunks,
                             int group) {
  const int64_t first = threadIdx.x % group * kCount;
  for (int64_t c = FirstUnit(group); c < chunks; c += UnitStride(group)) {
    for (int64_t column = first; column < args.widest;
         column += group * kCount) {
      SumChunk<kCount>(args, sorted, c, column);
    }
  }
}

// If a row begins in this chunk and continues in the next, returns the last
// entry of this row; otherwise -1.
__device__ int64_t EndOfRow(const GpuRowGrads& args, const Sorted& sorted,
                            int64_t chunk) {
  const int64_t end = (chunk + 1) * kChunk;
  if (end >= args.entries || Begins(sorted.keys, end)) return -1;
  const uint64_t key = sorted.keys[end];
  const int64_t begin = chunk * kChunk;
  const bool spans = sorted.keys[begin] == key && !Begins(sorted.keys, begin);
  if (key >= static_cast<uint64_t>(args.keys) || spans) return -1;
  return end + LastBegun(args.entries - end, static_cast<int64_t>(key),
                         [&](int64_t i) {
                           return static_cast<int64_t>(sorted.keys[end + i]);
                         });
}

// A thread block adds the partial sums of the row that begins in its chunk and
// continues in the next. Each of its `groups` groups adds every groups-th
// chunk. The first group then adds the sums of all groups.
template <int kCount>
__global__ void JoinKernel(GpuRowGrads args, Sorted sorted, int64_t chunks,
                           int group) {
  __shared__ Columns<float, kCount> partial[kBlockThreads];
  const int groups = kBlockThreads / group;
  const int mine = threadIdx.x / group;
  for (int64_t c = blockIdx.x; c < chunks; c += gridDim.x) {
    const int64_t last = EndOfRow(args, sorted, c);
    if (last < 0) continue;
    const int64_t table = TableOf(args, sorted.keys[last]);
    const int64_t width = args.tables[table].width;
    for (int64_t from = 0; from < width; from += group * kCount) {
      const int64_t column = from + threadIdx.x % group * kCount;
      Columns<float, kCount> sum = {};
      for (int64_t p = c + mine; p <= last / kChunk && column < width;
           p += groups) {
        const float* part = p == c ? sorted.after : sorted.before;
        const auto values =
            LoadColumns<kCount>(part + p * args.widest + column);
        for (int k = 0; k < kCount; ++k) sum.at[k] += values.at[k];
      }
      partial[threadIdx.x] = sum;
      __syncthreads();
      if (mine == 0 && column < width) {
        for (int g = 1; g < groups; ++g) {
          for (int k = 0; k < kCount; ++k) {
            sum.at[k] += partial[threadIdx.x + g * group].at[k];
          }
        }
        StoreColumns(sum, RowGradOf(args, sorted, table, last) + column);
      }
      __syncthreads();
    }
  }
}

int64_t ChunksOf(const GpuRowGrads& args) {
  return (args.entries + kChunk - 1) / kChunk;
}

// Returns the number of bits of the keys, which include args.keys itself.
int KeyBits(const GpuRowGrads& args) {
  int bits = 1;
  while (bits < 63 && args.keys >> bits != 0) ++bits;
  return bits;
}

// The scratch memory, divided into pieces that begin at multiples of 256 bytes.
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
      cub, *bytes, at.keys, at.sorted.keys, at.positions, at.sorted.entries,
      static_cast<int>(args.entries), 0, KeyBits(args), stream);
}

// Computes the running sum of the marks. The marks are in the memory of
// `positions`, which is free after the sort.
int CubCount(const GpuRowGrads& args, const Scratch& at, void* cub,
             size_t* bytes, cudaStream_t stream) {
  return cub::DeviceScan::InclusiveSum(cub, *bytes, at.positions,
                                       at.sorted.ordinal,
                                       static_cast<int>(args.entries), stream);
}

Scratch Divide(const GpuRowGrads& args, char* begin) {
  Scratch at = {};
  const size_t partial = ChunksOf(args) * args.widest;
  at.sorted.keys = Take<uint64_t>(args.entries, begin, &at.bytes);
  at.sorted.entries = Take<uint32_t>(args.entries, begin, &at.bytes);
  at.sorted.values = Take<uint64_t>(args.entries, begin, &at.bytes);
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
  const int group = GroupOf((args.widest + kCount - 1) / kCount);
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

int SortRowsGpu(const GpuRowGrads& args, void* scratch, void* stream_pointer) {
  const cudaStream_t stream = StreamOf(stream_pointer);
  if (args.entries == 0) {
    return cudaMemsetAsync(args.first_unique, 0,
                           (args.table_count + 1) * sizeof(int64_t), stream);
  }
  Scratch at = Divide(args, static_cast<char*>(scratch));
  const unsigned blocks = Blocks(args.entries);
  KeysKernel<<<blocks, kBlockThreads, 0, stream>>>(args, at.keys, at.positions,
                                                   at.sorted.values);
  int error = CubSort(args, at, at.cub, &at.cub_bytes, stream);
  if (error != cudaSuccess) return error;
  MarkKernel<<<blocks, kBlockThreads, 0, stream>>>(args, at.sorted.keys,
                                                   at.positions);
  error = CubCount(args, at, at.cub, &at.cub_bytes, stream);
  if (error != cudaSuccess) return error;
  UniqueKernel<<<blocks, kBlockThreads, 0, stream>>>(args, at.sorted);
  FirstsKernel<<<Blocks(args.table_count + 1), kBlockThreads, 0, stream>>>(
      args, at.sorted);
  return cudaGetLastError();
}

int SumRowGradsGpu(const GpuRowGrads& args, void* scratch, void* stream) {
  if (args.entries == 0 || args.widest == 0) return cudaSuccess;
  const Scratch at = Divide(args, static_cast<char*>(scratch));
  return args.quads ? SumSorted<4>(args, at.sorted, StreamOf(stream))
                    : SumSorted<1>(args, at.sorted, StreamOf(stream));
}

}  // namespace tfdist
