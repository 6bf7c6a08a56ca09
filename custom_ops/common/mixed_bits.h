// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_MIXED_BITS_H_
#define TFDIST_CUSTOM_OPS_COMMON_MIXED_BITS_H_

#include <cstdint>

#include "custom_ops/common/target_clones.h"

namespace tfdist {

// The golden ratio's fraction in 64 bits: multiples of it are spread evenly.
constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): numbers that differ in
// one bit become unrelated.
TFDIST_INLINE uint64_t MixBits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_MIXED_BITS_H_
