// SPDX-License-Identifier: Apache-2.0
//
// Vectors of floats for the update rules, in the compilers' vector extension:
// it is split into what the processor has. The rules are templates over V,
// which is `Lanes` or, in rows that are shorter, `float`.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_LANES_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_LANES_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "custom_ops/common/target_clones.h"

namespace tfdist {

constexpr int64_t kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

// A value at any address.
template <typename V, typename T>
TFDIST_INLINE V Load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <typename V, typename T>
TFDIST_INLINE void Store(const V& value, T* to) {
  std::memcpy(to, &value, sizeof(V));
}

TFDIST_INLINE float Sqrt(float x) { return std::sqrt(x); }

// Vectorised only with -fno-math-errno, which the build passes.
TFDIST_INLINE Lanes Sqrt(const Lanes& x) {
  Lanes root;
  for (int64_t k = 0; k < kLanes; ++k) root[k] = std::sqrt(x[k]);
  return root;
}

TFDIST_INLINE float Power(float x, float exponent) {
  return std::pow(x, exponent);
}

TFDIST_INLINE Lanes Power(const Lanes& x, float exponent) {
  Lanes power;
  for (int64_t k = 0; k < kLanes; ++k) power[k] = std::pow(x[k], exponent);
  return power;
}

// NaN in x stays.
template <typename V>
TFDIST_INLINE V Max(const V& x, const V& y) {
  return x < y ? y : x;
}

template <typename V>
TFDIST_INLINE V Clip(const V& x, float limit) {
  const V low = V{} - limit;
  const V high = V{} + limit;
  const V raised = x < low ? low : x;
  return raised > high ? high : raised;
}

// Names a type for a generic lambda.
template <typename V>
struct Of {
  using Type = V;
};

// Calls compute(j, Of<V>) for blocks of columns from j on that make up
// [0, columns), and store(j, result). The last block may overlap its
// neighbour, so it is computed before anything is stored.
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
