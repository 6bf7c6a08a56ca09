// SPDX-License-Identifier: Apache-2.0
//
// Rounding of a weight to bfloat16, on its bits. W is a 32-bit word or a vector
// of words.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_BFLOAT16_ROUNDING_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_BFLOAT16_ROUNDING_H_

#include <cstdint>

#include "custom_ops/common/counter_random.h"

namespace tfdist {

// Returns the random bits of a row for one step. The bits of its columns derive
// from them.
TFDIST_INLINE uint32_t RowBits(uint64_t seed, int64_t row) {
  return static_cast<uint32_t>(
      Mix<SplitMix64>(seed * kGoldenRatio + static_cast<uint64_t>(row)));
}

// Returns 16 random bits for each column.
template <typename W>
TFDIST_INLINE W ColumnBits(const W& column, uint32_t row_bits) {
  const W counter = (column + 1u) * 0x9E3779B9u + row_bits;
  return Mix<Murmur32>(counter) >> 16;
}

// Returns floats as words whose upper halves are the rounded bfloat16 numbers.
// `added` carries from the lower half, which is then cut off, into the upper
// half in those cases, or with that probability, in which the number is to be
// rounded up. Infinity and NaN do not change.
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

// Rounds one weight of a row. `row_bits` is used only for stochastic rounding.
TFDIST_INLINE uint16_t RoundedNumber(uint32_t bits, bool stochastic,
                                     uint32_t column, uint32_t row_bits) {
  const uint32_t rounded =
      stochastic ? Rounded<uint32_t>(bits, ColumnBits(column, row_bits))
                 : ToNearest(bits);
  return static_cast<uint16_t>(rounded >> 16);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_BFLOAT16_ROUNDING_H_
