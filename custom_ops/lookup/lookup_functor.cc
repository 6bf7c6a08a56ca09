// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/lookup/lookup_functor.h"

#include <algorithm>
#include <cstring>

#include "custom_ops/common/target_clones.h"
#include "custom_ops/lookup/row_vectors.h"

namespace tfdist {
namespace {

// Whether each of the segments [begin, end) has one entry, so that rows only
// need to be copied.
TFDIST_INLINE bool IsSingle(const int64_t* row_splits, int64_t begin,
                            int64_t end) {
  const int64_t shift = row_splits[begin] - begin;
  if (row_splits[end] - end != shift) return false;
  int64_t difference = 0;
  for (int64_t s = begin; s < end; ++s) {
    difference |= (row_splits[s] - s) ^ shift;
  }
  return difference == 0;
}

// Sums columns [column, column + columns) of the segments, in kVectors vectors
// of kLanes. The last vector ends at the last column and may overlap the one
// before.
template <typename T, int kLanes, int kVectors, bool kWeighted>
TFDIST_INLINE void SumColumns(const SegmentSum& args, const T* table,
                              int64_t begin, int64_t end, int64_t column,
                              int64_t columns) {
  table += column;
  const int64_t tail = columns - kLanes;
  const int64_t last_entry = args.row_splits[end] - 1;
  for (int64_t segment = begin; segment < end; ++segment) {
    Floats<kLanes> sums[kVectors] = {};
    const int64_t stop = args.row_splits[segment + 1];
    for (int64_t i = args.row_splits[segment]; i < stop; ++i) {
      const T* row = table + args.rows[i] * args.width;
      const int64_t ahead =
          i + kPrefetchAhead < last_entry ? i + kPrefetchAhead : last_entry;
      PrefetchRow(table + args.rows[ahead] * args.width, columns);
      for (int v = 0; v < kVectors; ++v) {
        const int64_t offset = v + 1 < kVectors ? v * kLanes : tail;
        Floats<kLanes> values;
        Load<kLanes>(row + offset, &values);
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
      *reinterpret_cast<Floats<kLanes>*>(out + offset) = sums[v];
    }
  }
}

// Like SumColumns, for segments of one entry each without weights.
template <typename T, int kLanes, int kVectors>
TFDIST_INLINE void CopyColumns(const SegmentSum& args, const T* table,
                               int64_t begin, int64_t end, int64_t column,
                               int64_t columns) {
  table += column;
  const int64_t tail = columns - kLanes;
  const int64_t* rows = args.rows + args.row_splits[begin];
  const int64_t count = end - begin;
  float* out = args.out + begin * args.width + column;
  for (int64_t i = 0; i < count; ++i, out += args.width) {
    const int64_t ahead = std::min(i + kPrefetchAhead, count - 1);
    PrefetchRow(table + rows[ahead] * args.width, columns);
    const T* row = table + rows[i] * args.width;
    for (int v = 0; v < kVectors; ++v) {
      const int64_t offset = v + 1 < kVectors ? v * kLanes : tail;
      Load<kLanes>(row + offset,
                   reinterpret_cast<Floats<kLanes>*>(out + offset));
    }
  }
}

// Like CopyColumns, for all columns of wide rows in one pass, with the same
// number of cache lines on their way as for narrow rows.
template <typename T>
TFDIST_INLINE void CopyWideRows(const SegmentSum& args, const T* table,
                                int64_t begin, int64_t end) {
  constexpr int64_t kLine = kLineBytes / sizeof(T);
  constexpr int64_t kLinesAhead = 4 * kPrefetchAhead;
  const int64_t width = args.width;
  const int64_t rows_ahead =
      std::max<int64_t>(1, kLinesAhead / (width / kLine));
  const int64_t* rows = args.rows + args.row_splits[begin];
  const int64_t count = end - begin;
  float* out = args.out + begin * width;
  for (int64_t i = 0; i < count; ++i, out += width) {
    const int64_t ahead = std::min(i + rows_ahead, count - 1);
    PrefetchLines<false>(table + rows[ahead] * width, width);
    const T* row = table + rows[i] * width;
    for (int64_t j = 0; j < width; j += 16) {
      const int64_t offset = std::min(j, width - 16);
      Load<16>(row + offset, reinterpret_cast<Floats<16>*>(out + offset));
    }
  }
}

// Calls SumColumns or CopyColumns with the number of vectors as a constant.
template <typename T, int kLanes, int kVectors>
TFDIST_INLINE void SumVectors(const SegmentSum& args, const T* table,
                              int64_t begin, int64_t end, int64_t column,
                              int64_t columns, bool single) {
  if constexpr (kVectors > 1) {
    if (columns <= kLanes * (kVectors - 1)) {
      SumVectors<T, kLanes, kVectors - 1>(args, table, begin, end, column,
                                          columns, single);
      return;
    }
  }
  if (args.weights != nullptr) {
    SumColumns<T, kLanes, kVectors, true>(args, table, begin, end, column,
                                          columns);
  } else if (single) {
    CopyColumns<T, kLanes, kVectors>(args, table, begin, end, column, columns);
  } else {
    SumColumns<T, kLanes, kVectors, false>(args, table, begin, end, column,
                                           columns);
  }
}

template <typename T>
TFDIST_INLINE void Sum(const SegmentSum& args, const T* table, int64_t begin,
                       int64_t end) {
  const int64_t width = args.width;
  if (begin >= end || width == 0) return;
  if (args.row_splits[begin] == args.row_splits[end]) {
    std::memset(args.out + begin * width, 0,
                (end - begin) * width * sizeof(float));
    return;
  }
  const bool single = IsSingle(args.row_splits, begin, end);
  if (width < 4) {
    SumVectors<T, 1, 3>(args, table, begin, end, 0, width, single);
  } else if (width < 8) {
    SumVectors<T, 4, 2>(args, table, begin, end, 0, width, single);
  } else if (width < 16) {
    SumVectors<T, 8, 2>(args, table, begin, end, 0, width, single);
  } else {
    constexpr int64_t kMostColumns = 16 * kMaxVectors;
    if (single && args.weights == nullptr && width > kMostColumns) {
      CopyWideRows(args, table, begin, end);
      return;
    }
    int64_t column = 0;
    for (; width - column > kMostColumns; column += kMostColumns) {
      SumVectors<T, 16, kMaxVectors>(args, table, begin, end, column,
                                     kMostColumns, single);
    }
    // The last columns, at least one vector.
    if (width - column < 16) column = width - 16;
    SumVectors<T, 16, kMaxVectors>(args, table, begin, end, column,
                                   width - column, single);
  }
}

}  // namespace

TFDIST_CLONES
void SegmentSumCpu(const SegmentSum& args, int64_t begin, int64_t end) {
  Sum(args, args.table, begin, end);
}

TFDIST_CLONES
void SegmentSumBfloat16Cpu(const SegmentSum& args, const Bfloat16* table,
                           int64_t begin, int64_t end) {
  Sum(args, table, begin, end);
}

TFDIST_CLONES
uint64_t HighestRow(const int64_t* rows, int64_t count) {
  uint64_t highest = 0;
  for (int64_t i = 0; i < count; ++i) {
    highest = std::max(highest, static_cast<uint64_t>(rows[i]));
  }
  return highest;
}

}  // namespace tfdist
