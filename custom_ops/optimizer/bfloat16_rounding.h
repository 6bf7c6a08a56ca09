// SPDX-License-Identifier: Apache-2.0
//
// How a weight becomes bfloat16, by its bits: W is a word, or a vector of them.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_BFLOAT16_ROUNDING_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_BFLOAT16_ROUNDING_H_

#include <cstdint>

#include "custom_ops/common/counter_random.h"

namespace tfdist {

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

// One weight of a row; `row_bits` count only where it is stochastic.
TFDIST_INLINE uint16_t RoundedNumber(uint32_t bits, bool stochastic,
                                     uint32_t column, uint32_t row_bits) {
  const uint32_t rounded =
      stochastic ? Rounded<uint32_t>(bits, ColumnBits(column, row_bits))
                 : ToNearest(bits);
  return static_cast<uint16_t>(rounded >> 16);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_BFLOAT16_ROUNDING_H_
