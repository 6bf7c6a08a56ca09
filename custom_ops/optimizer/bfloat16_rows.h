// SPDX-License-Identifier: Apache-2.0
//
// Rows of a bfloat16 table: widened to float, updated, and rounded back, to
// nearest or stochastically.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_BFLOAT16_ROWS_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_BFLOAT16_ROWS_H_

#include <cstdint>

#include "custom_ops/optimizer/bfloat16_rounding.h"
#include "custom_ops/optimizer/row_lanes.h"
#include "custom_ops/optimizer/row_update_functor.h"

namespace tfdist {

typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));

// For rows shorter than a vector, and columns after the last complete vector.
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
    to[j] = RoundedNumber(WordOf(from[j]), rounding.stochastic,
                          static_cast<uint32_t>(j), row_bits);
  }
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_BFLOAT16_ROWS_H_
