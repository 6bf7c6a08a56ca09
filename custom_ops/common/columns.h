// SPDX-License-Identifier: Apache-2.0
//
// Adjacent columns of a row as one load or store of up to 16 bytes.
#ifndef TFDIST_CUSTOM_OPS_COMMON_COLUMNS_H_
#define TFDIST_CUSTOM_OPS_COMMON_COLUMNS_H_

#include <cstdint>

#include "custom_ops/common/float_bits.h"

namespace tfdist {

// A number of a bfloat16 table: the upper half of a float.
struct Bfloat16 {
  uint16_t bits;
};

template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Columns {
  T at[kCount];
};

TFDIST_INLINE float FloatFrom(float value) { return value; }

TFDIST_INLINE float FloatFrom(Bfloat16 value) {
  return FloatOf(uint32_t{value.bits} << 16);
}

// `from` must be aligned to the size of all columns.
template <int kCount, typename T>
TFDIST_INLINE Columns<float, kCount> LoadColumns(const T* from) {
  const auto loaded = *reinterpret_cast<const Columns<T, kCount>*>(from);
  Columns<float, kCount> result;
  for (int k = 0; k < kCount; ++k) result.at[k] = FloatFrom(loaded.at[k]);
  return result;
}

// Stores in pieces of 16 bytes, because the floats of eight bfloat16 columns
// take 32 bytes.
template <int kCount>
TFDIST_INLINE void StoreColumns(const Columns<float, kCount>& values,
                                float* to) {
  constexpr int kPiece = kCount < 4 ? kCount : 4;
  for (int k = 0; k < kCount; k += kPiece) {
    Columns<float, kPiece> piece;
    for (int i = 0; i < kPiece; ++i) piece.at[i] = values.at[k + i];
    *reinterpret_cast<Columns<float, kPiece>*>(to + k) = piece;
  }
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_COLUMNS_H_
