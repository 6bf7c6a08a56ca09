// SPDX-License-Identifier: Apache-2.0
//
// Applies a rule to all columns of a row, and computes a row's mean square, on
// a CPU.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_UPDATE_ROW_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_UPDATE_ROW_H_

#include <cstdint>
#include <cstring>

#include "custom_ops/optimizer/row_lanes.h"
#include "custom_ops/optimizer/row_rules.h"

namespace tfdist {

template <typename Rule>
TFDIST_INLINE void UpdateRow(const Rule& rule, const Row& row) {
  ForEachBlock(
      row.dim,
      [&](int64_t j, auto of) TFDIST_ALWAYS {
        return Compute<typename decltype(of)::Type>(rule, row, j);
      },
      [&](int64_t j, const auto& next) TFDIST_ALWAYS {
        Store(next.weights, row.weights + j);
        for (int k = 0; k < Rule::kNumSlots; ++k) {
          if constexpr (Rule::kNumSlots > 0) {
            Store(next.slots[k], row.slots[k] + j);
          }
        }
      });
}

// Sums the lanes by halves, in the same order on every processor.
TFDIST_INLINE float Sum(const Lanes& lanes) {
  typedef float Half __attribute__((vector_size(8 * sizeof(float))));
  typedef float Quarter __attribute__((vector_size(4 * sizeof(float))));
  Half halves[2];
  std::memcpy(halves, &lanes, sizeof(lanes));
  const Half half = halves[0] + halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof(half));
  const Quarter quarter = quarters[0] + quarters[1];
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

// The last vector overlaps the one before. The overlapping lanes count once.
TFDIST_INLINE float SumSquares(const float* grad, int64_t dim) {
  constexpr Lanes kLane = {0, 1, 2,  3,  4,  5,  6,  7,
                           8, 9, 10, 11, 12, 13, 14, 15};
  float sum = 0;
  if (dim < kLanes) {
    for (int64_t j = 0; j < dim; ++j) sum += grad[j] * grad[j];
  } else {
    const int64_t last = dim - kLanes;
    Lanes lanes = {};
    int64_t j = 0;
    for (; j < last; j += kLanes) {
      const Lanes g = Load<Lanes>(grad + j);
      lanes += g * g;
    }
    const Lanes g = Load<Lanes>(grad + last);
    lanes += kLane < static_cast<float>(j - last) ? Lanes{} : g * g;
    sum = Sum(lanes);
  }
  return sum;
}

TFDIST_INLINE float MeanSquare(const float* grad, int64_t dim) {
  return SumSquares(grad, dim) / static_cast<float>(dim);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_UPDATE_ROW_H_
