// SPDX-License-Identifier: Apache-2.0
//
// Rows of a bfloat16 table: widened to float, updated, and rounded back to
// nearest or at random.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_BFLOAT16_ROWS_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_BFLOAT16_ROWS_H_

#include <cstdint>

#include "custom_ops/common/counter_random.h"
#include "custom_ops/optimizer/row_lanes.h"
#include "custom_ops/optimizer/row_update_functor.h"

namespace tfdist {

typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));

// Random bits of a row for one step; those of its columns derive from them.
TFDIST_INLINE uint32_t RowBits(uint64_t seed, int64_t row) {
  return static_cast<uint32_t>(
      Mix<SplitMix64>(seed * kGoldenRatio + static_cast<uint64_t>(row)));
}

// 16 random bits for every column.
template <typename W>
TFDIST_INLINE W ColumnBits(const W& column, uint32_t row_bits) {
  const W counter = (column + 1u) * 0x9E3779B9u + row_bits;
  return Mix<Murmur32>(counter) >> 16;
}

// Floats as words whose upper halves are the bfloat16. What is added before
// the lower half is cut off carries into the upper one with the probability,
// or in the cases, that the value shall be rounded up. Infinity and NaN stay.
template <typename W>
TFDIST_INLINE W Rounded(const W& bits, const W& added) {
  constexpr uint32_t kInfinity = 0x7F800000;
  constexpr uint32_t kQuiet = 0x00400000;
  const W quiet = (bits & 0x007FFFFFu) != 0u ? bits | kQuiet : bits;
  return (bits & kInfinity) == kInfinity ? quiet : bits + added;
}

template <typename W>
TFDIST_INLINE W ToNearest(const W& bits) {
  return Rounded<W>(bits, ((bits >> 16) & 1u) + 0x7FFFu);
}

// Shorter rows, and columns behind the last whole vector.
TFDIST_INLINE uint32_t WordOf(float value) { return Load<uint32_t>(&value); }

TFDIST_INLINE void WidenRow(const uint16_t* from, int64_t dim, float* to) {
  int64_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) {
    const Words bits = __builtin_convertvector(Load<Halves>(from + j), Words);
    Store(bits << 16, to + j);
  }
  for (; j < dim; ++j) Store(uint32_t{from[j]} << 16, to + j);
}

TFDIST_INLINE void RoundRow(const float* from, int64_t dim,
                            const Rounding& rounding, int64_t row,
                            uint16_t* to) {
  const uint32_t row_bits = RowBits(rounding.seed, row);
  constexpr Words kFirst = {0, 1, 2,  3,  4,  5,  6,  7,
                            8, 9, 10, 11, 12, 13, 14, 15};
  int64_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) {
    const Words bits = Load<Words>(from + j);
    Words rounded;
    if (rounding.stochastic) {
      const Words column = kFirst + static_cast<uint32_t>(j);
      rounded = Rounded<Words>(bits, ColumnBits(column, row_bits));
    } else {
      rounded = ToNearest(bits);
    }
    Store(__builtin_convertvector(rounded >> 16, Halves), to + j);
  }
  for (; j < dim; ++j) {
    const uint32_t bits = WordOf(from[j]);
    const uint32_t added = ColumnBits(static_cast<uint32_t>(j), row_bits);
    const uint32_t rounded =
        rounding.stochastic ? Rounded(bits, added) : ToNearest(bits);
    to[j] = static_cast<uint16_t>(rounded >> 16);
  }
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_BFLOAT16_ROWS_H_
