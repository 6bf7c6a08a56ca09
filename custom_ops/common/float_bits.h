// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_FLOAT_BITS_H_
#define TFDIST_CUSTOM_OPS_COMMON_FLOAT_BITS_H_

#include <cstdint>
#include <cstring>

#include "custom_ops/common/target_clones.h"

namespace tfdist {

// Bits of a 32-bit float.
constexpr uint32_t kSign = 0x80000000;
constexpr uint32_t kInfinity = 0x7F800000;

TFDIST_INLINE uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

TFDIST_INLINE float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_FLOAT_BITS_H_
