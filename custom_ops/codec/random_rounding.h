// SPDX-License-Identifier: Apache-2.0
//
// Stochastic rounding of one number; see round_functor.h.
#ifndef TFDIST_CUSTOM_OPS_CODEC_RANDOM_ROUNDING_H_
#define TFDIST_CUSTOM_OPS_CODEC_RANDOM_ROUNDING_H_

#include <cstdint>

#include "custom_ops/common/counter_random.h"
#include "custom_ops/common/float_bits.h"

namespace tfdist {

// Returns a key of two words for a seed. Adjacent seeds get unrelated keys.
TFDIST_INLINE uint64_t RoundingKey(uint64_t seed) {
  return Mix<SplitMix64>(seed + kGoldenRatio);
}

// Returns 32 random bits for an index. Indices that differ by a multiple of
// 2^32 get the same bits.
TFDIST_INLINE uint32_t RandomBits(uint64_t key, uint32_t index) {
  return Mix<LowBias32>(index ^ static_cast<uint32_t>(key),
                        static_cast<uint32_t>(key >> 32));
}

// Rounding removes the lower half of the bits. Adding as many random bits
// carries into the upper half with the required probability.
TFDIST_INLINE uint16_t RandomToBfloat16(float value, uint32_t random) {
  const uint32_t bits = BitsOf(value);
  const uint32_t rounded = (bits + (random & 0xFFFF)) >> 16;
  const bool nan = (bits & ~kSign) > kInfinity;
  return nan ? bits >> 16 | 0x40 : rounded;
}

TFDIST_INLINE uint16_t RandomToFloat16(float value, uint32_t random) {
  constexpr uint32_t kCutBits = 13;
  constexpr uint32_t kExponentShift = (127 - 15) << 10;
  constexpr uint32_t kLeastNormal = 0x38800000;  // 2^-14
  constexpr uint32_t kTooHigh = 0x47800000;      // 2^16
  const uint32_t bits = BitsOf(value);
  const uint32_t magnitude = bits & ~kSign;
  // As in RandomToBfloat16.
  const uint32_t carried = magnitude + (random & ((1u << kCutBits) - 1));
  uint32_t normal = (carried >> kCutBits) - kExponentShift;
  normal = carried >= kTooHigh ? 0x7C00 : normal;
  // Subnormal numbers have steps of 2^-24, and the bits of the result are the
  // number of steps. Other numbers are replaced by 0 to keep the conversion in
  // range.
  const float steps =
      magnitude < kLeastNormal ? FloatOf(magnitude) * 0x1p24f : 0.0f;
  const int32_t whole = static_cast<int32_t>(steps);
  const float random_fraction =
      static_cast<float>(static_cast<int32_t>(random >> 9)) * 0x1p-23f +
      0x1p-24f;
  const uint32_t subnormal =
      whole + (random_fraction < steps - static_cast<float>(whole) ? 1 : 0);
  uint32_t result = magnitude < kLeastNormal ? subnormal : normal;
  result = magnitude > kInfinity ? 0x7E00 : result;
  return result | (bits & kSign) >> 16;
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_RANDOM_ROUNDING_H_
