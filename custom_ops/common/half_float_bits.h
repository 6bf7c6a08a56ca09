// SPDX-License-Identifier: Apache-2.0
//
// Conversion of one number between 32 and 16 bits; see half_floats.h.
#ifndef TFDIST_CUSTOM_OPS_COMMON_HALF_FLOAT_BITS_H_
#define TFDIST_CUSTOM_OPS_COMMON_HALF_FLOAT_BITS_H_

#include <cstdint>

#include "custom_ops/common/float_bits.h"

namespace tfdist {

// The bits of a float's mantissa that a float16 lacks, and the difference of
// the exponents.
constexpr uint32_t kCutBits = 13;
constexpr uint32_t kExponentShift = (127 - 15) << 23;
constexpr uint32_t kLeastNormal = 0x38800000;  // 2^-14, for a float16
constexpr uint32_t kTooHigh = 0x47800000;      // 2^16

// Returns `yes` or `no` without a branch. A compiler would not vectorize a
// branch, because skipped float operations might not trap.
TFDIST_INLINE uint32_t Select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

TFDIST_INLINE float FromFloat16(uint16_t half) {
  const uint32_t magnitude = half & 0x7FFF;
  // Below 2^10, the bits are a number of steps of 2^-24.
  const float subnormal =
      static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  uint32_t bits = (magnitude << kCutBits) + kExponentShift;
  bits = Select(magnitude >= 0x7C00, kInfinity | magnitude << kCutBits, bits);
  bits = Select(magnitude < 0x0400, BitsOf(subnormal), bits);
  return FloatOf(bits | (half & 0x8000u) << 16);
}

TFDIST_INLINE uint16_t ToFloat16(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t magnitude = bits & ~kSign;
  const uint32_t odd = magnitude >> kCutBits & 1;
  const uint32_t rounded = magnitude + ((1u << (kCutBits - 1)) - 1) + odd;
  const uint32_t normal = (rounded - kExponentShift) >> kCutBits;
  // In the sum with 1/2, the last bit of a float is a step of 2^-24.
  const uint32_t subnormal =
      BitsOf(FloatOf(Select(magnitude < kLeastNormal, magnitude, 0)) + 0.5f) -
      BitsOf(0.5f);
  uint32_t half = Select(magnitude < kLeastNormal, subnormal, normal);
  half = Select(rounded >= kTooHigh, 0x7C00, half);
  half = Select(magnitude > kInfinity, 0x7E00, half);
  return half | (bits & kSign) >> 16;
}

TFDIST_INLINE uint16_t ToBfloat16(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const bool nan = (bits & ~kSign) > kInfinity;
  return Select(nan, (bits & kSign) >> 16 | 0x7FC0, rounded);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_HALF_FLOAT_BITS_H_
