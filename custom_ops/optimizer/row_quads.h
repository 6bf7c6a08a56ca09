// SPDX-License-Identifier: Apache-2.0
//
// Four columns for the update rules on a GPU: one load or store of 16 bytes.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_QUADS_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_QUADS_H_

#include "custom_ops/common/columns.h"
#include "custom_ops/optimizer/row_numbers.h"

namespace tfdist {

using Quad = Columns<float, 4>;

template <>
TFDIST_INLINE float Load<float, float>(const float* from) {
  return *from;
}

template <>
TFDIST_INLINE Quad Load<Quad, float>(const float* from) {
  return *reinterpret_cast<const Quad*>(from);
}

TFDIST_INLINE float ColumnOf(const Quad& quad, int k) { return quad.at[k]; }
TFDIST_INLINE float ColumnOf(float all, int) { return all; }

// Applies the operation to each column. A float operand is used for all four
// columns.
template <typename X, typename Y, typename Operation>
TFDIST_INLINE Quad EachColumn(const X& x, const Y& y,
                              const Operation& operation) {
  Quad result;
  for (int k = 0; k < 4; ++k) {
    result.at[k] = operation(ColumnOf(x, k), ColumnOf(y, k));
  }
  return result;
}

struct Plus {
  TFDIST_INLINE float operator()(float x, float y) const { return x + y; }
};

struct Minus {
  TFDIST_INLINE float operator()(float x, float y) const { return x - y; }
};

struct Times {
  TFDIST_INLINE float operator()(float x, float y) const { return x * y; }
};

struct Over {
  TFDIST_INLINE float operator()(float x, float y) const { return x / y; }
};

struct Greater {
  TFDIST_INLINE float operator()(float x, float y) const { return Max(x, y); }
};

struct Clipped {
  TFDIST_INLINE float operator()(float x, float y) const { return Clip(x, y); }
};

struct Powered {
  TFDIST_INLINE float operator()(float x, float y) const { return Power(x, y); }
};

TFDIST_INLINE Quad operator+(const Quad& x, const Quad& y) {
  return EachColumn(x, y, Plus());
}
TFDIST_INLINE Quad operator+(const Quad& x, float y) {
  return EachColumn(x, y, Plus());
}
TFDIST_INLINE Quad operator-(const Quad& x, const Quad& y) {
  return EachColumn(x, y, Minus());
}
TFDIST_INLINE Quad operator*(const Quad& x, const Quad& y) {
  return EachColumn(x, y, Times());
}
TFDIST_INLINE Quad operator*(float x, const Quad& y) {
  return EachColumn(x, y, Times());
}
TFDIST_INLINE Quad operator*(const Quad& x, float y) { return y * x; }
TFDIST_INLINE Quad operator/(const Quad& x, const Quad& y) {
  return EachColumn(x, y, Over());
}
TFDIST_INLINE void operator-=(Quad& x, const Quad& y) { x = x - y; }

TFDIST_INLINE Quad Sqrt(const Quad& x) {
  return {Sqrt(x.at[0]), Sqrt(x.at[1]), Sqrt(x.at[2]), Sqrt(x.at[3])};
}
TFDIST_INLINE Quad Power(const Quad& x, float exponent) {
  return EachColumn(x, exponent, Powered());
}
TFDIST_INLINE Quad Max(const Quad& x, const Quad& y) {
  return EachColumn(x, y, Greater());
}
TFDIST_INLINE Quad Clip(const Quad& x, float limit) {
  return EachColumn(x, limit, Clipped());
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_QUADS_H_
