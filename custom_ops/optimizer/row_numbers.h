// SPDX-License-Identifier: Apache-2.0
//
// The operations that the update rules use. The rules are templates over V,
// which is `float` or several adjacent columns. These are defined in
// row_lanes.h for a CPU and in row_quads.h for a GPU.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_NUMBERS_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_NUMBERS_H_

#include <cmath>
#include <cstring>

#include "custom_ops/common/target_clones.h"

namespace tfdist {

// Loads a value from any address.
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

TFDIST_INLINE float Power(float x, float exponent) {
  return std::pow(x, exponent);
}

// Returns x if x is NaN.
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

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_NUMBERS_H_
