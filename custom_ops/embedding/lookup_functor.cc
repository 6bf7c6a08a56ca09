// SPDX-License-Identifier: Apache-2.0
#include "lookup_functor.h"

#include <cstring>

// The wheel runs on any x86-64; the dynamic linker picks the fastest clone.
// Inlined callees are compiled for the clone's processor as well.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TFDIST_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TFDIST_CLONES
#endif
#define TFDIST_INLINE inline __attribute__((always_inline))

namespace tfdist {
namespace {

// `kLanes` floats at any address; the compiler splits what the processor's
// registers cannot hold.
template <int kLanes>
struct Vector {
  typedef float Type __attribute__((vector_size(kLanes * sizeof(float)),
                                    aligned(alignof(float)), may_alias));
};

constexpr int kMaxVectors = 8;          // accumulators that stay in registers
constexpr int64_t kPrefetchAhead = 12;  // entries; hides a trip to memory
constexpr int64_t kLineFloats = 16;

TFDIST_INLINE void PrefetchRow(const float* row, int64_t width) {
  for (int64_t j = 0; j < width; j += kLineFloats) __builtin_prefetch(row + j);
  __builtin_prefetch(row + width - 1);
}

// Columns [column, column + columns) of the segments, in kVectors vectors of
// kLanes; the last one ends at the last column and may overlap its neighbour.
template <int kLanes, int kVectors, bool kWeighted>
TFDIST_INLINE void SumColumns(const SegmentSum& args, int64_t begin,
                              int64_t end, int64_t column, int64_t columns) {
  using Lanes = typename Vector<kLanes>::Type;
  const float* table = args.table + column;
  const int64_t tail = columns - kLanes;
  const int64_t last_entry = args.row_splits[end] - 1;
  for (int64_t segment = begin; segment < end; ++segment) {
    Lanes sums[kVectors] = {};
    const int64_t stop = args.row_splits[segment + 1];
    for (int64_t i = args.row_splits[segment]; i < stop; ++i) {
      const float* row = table + args.rows[i] * args.width;
      const int64_t ahead =
          i + kPrefetchAhead < last_entry ? i + kPrefetchAhead : last_entry;
      PrefetchRow(table + args.rows[ahead] * args.width, columns);
      for (int v = 0; v < kVectors; ++v) {
        const int64_t offset = v + 1 < kVectors ? v * kLanes : tail;
        const Lanes values = *reinterpret_cast<const Lanes*>(row + offset);
        if (kWeighted) {
          sums[v] += args.weights[i] * values;
        } else {
          sums[v] += values;
        }
      }
    }
    float* out = args.out + segment * args.width + column;
    for (int v = 0; v < kVectors; ++v) {
      const int64_t offset = v + 1 < kVectors ? v * kLanes : tail;
      *reinterpret_cast<Lanes*>(out + offset) = sums[v];
    }
  }
}

// Calls SumColumns with the number of vectors as a constant.
template <int kLanes, int kVectors>
TFDIST_INLINE void SumVectors(const SegmentSum& args, int64_t begin,
                              int64_t end, int64_t column, int64_t columns) {
  if constexpr (kVectors > 1) {
    if (columns <= kLanes * (kVectors - 1)) {
      SumVectors<kLanes, kVectors - 1>(args, begin, end, column, columns);
      return;
    }
  }
  if (args.weights != nullptr) {
    SumColumns<kLanes, kVectors, true>(args, begin, end, column, columns);
  } else {
    SumColumns<kLanes, kVectors, false>(args, begin, end, column, columns);
  }
}

}  // namespace

TFDIST_CLONES
void SegmentSumCpu(const SegmentSum& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  if (begin >= end || width == 0) return;
  if (args.row_splits[begin] == args.row_splits[end]) {
    std::memset(args.out + begin * width, 0,
                (end - begin) * width * sizeof(float));
  } else if (width < 4) {
    SumVectors<1, 3>(args, begin, end, 0, width);
  } else if (width < 16) {
    SumVectors<4, 4>(args, begin, end, 0, width);
  } else {
    constexpr int64_t kMostColumns = 16 * kMaxVectors;
    int64_t column = 0;
    for (; width - column > kMostColumns; column += kMostColumns) {
      SumVectors<16, kMaxVectors>(args, begin, end, column, kMostColumns);
    }
    // The last columns, at least one vector of them.
    if (width - column < 16) column = width - 16;
    SumVectors<16, kMaxVectors>(args, begin, end, column, width - column);
  }
}

}  // namespace tfdist
