// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/lookup/lookup_grad_functor.h"

#include "custom_ops/common/target_clones.h"
#include "custom_ops/lookup/row_vectors.h"

namespace tfdist {
namespace {

constexpr int kMostStores = 4;

// Sums columns [column, column + columns) of the rows, in kVectors vectors of
// kLanes. The last vector ends at the last column and may overlap the one
// before. The partial sum is stored after each entry, so the last store of a
// row is its result.
template <int kLanes, int kVectors, bool kWeighted>
TFDIST_INLINE void SumColumns(const RowGradSum& args, int64_t begin,
                              int64_t end, int64_t column, int64_t columns) {
  using Words = typename Vector<int32_t, kLanes>::Type;
  const float* grad = args.grad + column;
  const int64_t tail = columns - kLanes;
  const int64_t stop = args.row_splits[end];
  Words sums[kVectors] = {};  // the bits of floats
  int64_t next = begin * args.width + column;
  float* out = args.out;
  for (int64_t i = args.row_splits[begin]; i < stop; ++i) {
    const uint64_t entry = args.entries[i];
    const int64_t ahead = i + kPrefetchAhead < stop ? i + kPrefetchAhead : i;
    PrefetchRow(grad + (args.entries[ahead] >> 1), columns);
    const int32_t first = entry & 1;
    const float* from = grad + (entry >> 1);
    // A mask for the partial sums: zero at the first entry of a row.
    const int32_t keep = first - 1;
    out = first ? args.out + next : out;
    next += first ? args.width : 0;
    for (int v = 0; v < kVectors; ++v) {
      const int64_t offset = v + 1 < kVectors ? v * kLanes : tail;
      Floats<kLanes> values;
      Load<kLanes>(from + offset, &values);
      if (kWeighted) values *= args.weights[i];
      values += reinterpret_cast<Floats<kLanes>>(sums[v] & keep);
      sums[v] = reinterpret_cast<Words>(values);
    }
    // With many vectors, the stores would take more time than a branch.
    if (kVectors > kMostStores && i + 1 < stop && !(args.entries[i + 1] & 1)) {
      continue;
    }
    for (int v = 0; v < kVectors; ++v) {
      const int64_t offset = v + 1 < kVectors ? v * kLanes : tail;
      *reinterpret_cast<Words*>(out + offset) = sums[v];
    }
  }
}

// Calls SumColumns with the number of vectors as a constant.
template <int kLanes, int kVectors>
TFDIST_INLINE void SumVectors(const RowGradSum& args, int64_t begin,
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
void RowGradSumCpu(const RowGradSum& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  if (begin >= end || width == 0) return;
  if (width < 4) {
    SumVectors<1, 3>(args, begin, end, 0, width);
  } else if (width < 8) {
    SumVectors<4, 2>(args, begin, end, 0, width);
  } else if (width < 16) {
    SumVectors<8, 2>(args, begin, end, 0, width);
  } else {
    constexpr int64_t kMostColumns = 16 * kMaxVectors;
    int64_t column = 0;
    for (; width - column > kMostColumns; column += kMostColumns) {
      SumVectors<16, kMaxVectors>(args, begin, end, column, kMostColumns);
    }
    // The last columns, at least one vector.
    if (width - column < 16) column = width - 16;
    SumVectors<16, kMaxVectors>(args, begin, end, column, width - column);
  }
}

}  // namespace tfdist
