// SPDX-License-Identifier: Apache-2.0
//
// Vectors of floats for the update rules, in the compilers' vector extension.
// The compiler splits them into the processor's vectors. Rows shorter than a
// vector are processed as floats.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_LANES_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_LANES_H_

#include <cmath>
#include <cstdint>

#include "custom_ops/common/target_clones.h"
#include "custom_ops/optimizer/row_numbers.h"

namespace tfdist {

constexpr int64_t kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

// Vectorized only with -fno-math-errno, which the build uses.
TFDIST_INLINE Lanes Sqrt(const Lanes& x) {
  Lanes root;
  for (int64_t k = 0; k < kLanes; ++k) root[k] = std::sqrt(x[k]);
  return root;
}

TFDIST_INLINE Lanes Power(const Lanes& x, float exponent) {
  Lanes power;
  for (int64_t k = 0; k < kLanes; ++k) power[k] = std::pow(x[k], exponent);
  return power;
}

// Names a type for a generic lambda.
template <typename V>
struct Of {
  using Type = V;
};

// Divides the columns [0, columns) into blocks. Calls compute(j, Of<V>) and
// store(j, result) for each block, which starts at column j. The last block may
// overlap the one before, so it is computed before any block is stored.
template <typename Compute, typename Keep>
TFDIST_INLINE void ForEachBlock(int64_t columns, const Compute& compute,
                                const Keep& store) {
  if (columns < kLanes) {
    for (int64_t j = 0; j < columns; ++j) store(j, compute(j, Of<float>{}));
    return;
  }
  const int64_t last = columns - kLanes;
  const auto tail = compute(last, Of<Lanes>{});
  for (int64_t j = 0; j < last; j += kLanes) store(j, compute(j, Of<Lanes>{}));
  store(last, tail);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_LANES_H_
