// SPDX-License-Identifier: Apache-2.0
//
// What the update rules are written in. They are templates over V, which is
// `float`, or several neighbouring columns: row_lanes.h has those of a CPU,
// row_quads.h those of a GPU.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_NUMBERS_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_NUMBERS_H_

#include <cmath>
#include <cstring>

#include "custom_ops/common/target_clones.h"

namespace tfdist {

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

TFDIST_INLINE float Power(float x, float exponent) {
  return std::pow(x, exponent);
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

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_NUMBERS_H_
