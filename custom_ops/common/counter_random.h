// SPDX-License-Identifier: Apache-2.0
//
// Random numbers as a function of a counter. There is no state, so any rank or
// thread can compute any number, in any order. There are two generators:
//
//   Philox   for initial values of tables: ten rounds for four numbers, because
//            a table has billions of numbers, which must not show a pattern
//   Mix      for rounding: one or two rounds per number, which mix a seed and a
//            position. It has three sets of constants, which are equally good.
//            Each user keeps its set, because others would give other numbers,
//            and a training that is repeated with its seed must round equally.
#ifndef TFDIST_CUSTOM_OPS_COMMON_COUNTER_RANDOM_H_
#define TFDIST_CUSTOM_OPS_COMMON_COUNTER_RANDOM_H_

#include <array>
#include <cstdint>

#include "custom_ops/common/target_clones.h"

namespace tfdist {

// The fractional part of the golden ratio in 64 bits. Its multiples are evenly
// distributed.
constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;

// Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", 2011): four words of random bits for a key and a counter.
TFDIST_INLINE std::array<uint32_t, 4> Philox(uint64_t key, uint64_t counter_low,
                                             uint64_t counter_high) {
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  std::array<uint32_t, 4> x = {static_cast<uint32_t>(counter_low),
                               static_cast<uint32_t>(counter_low >> 32),
                               static_cast<uint32_t>(counter_high),
                               static_cast<uint32_t>(counter_high >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * x[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * x[2];
    x = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ k0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ x[3] ^ k1, static_cast<uint32_t>(a)};
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return x;
}

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
struct SplitMix64 {
  static constexpr int kShift1 = 30;
  static constexpr int kShift2 = 27;
  static constexpr int kShift3 = 31;
  static constexpr uint64_t kFactor1 = 0xBF58476D1CE4E5B9;
  static constexpr uint64_t kFactor2 = 0x94D049BB133111EB;
};

// The finalizer "lowbias32" (Wellons 2018).
struct LowBias32 {
  static constexpr int kShift1 = 16;
  static constexpr int kShift2 = 15;
  static constexpr int kShift3 = 16;
  static constexpr uint32_t kFactor1 = 0x7FEB352D;
  static constexpr uint32_t kFactor2 = 0x846CA68B;
};

// The finalizer of MurmurHash3 (Appleby 2011).
struct Murmur32 {
  static constexpr int kShift1 = 16;
  static constexpr int kShift2 = 13;
  static constexpr int kShift3 = 16;
  static constexpr uint32_t kFactor1 = 0x85EBCA6B;
  static constexpr uint32_t kFactor2 = 0xC2B2AE35;
};

// Mixes words, or vectors of words. Words that differ in one bit get unrelated
// results. `key` is added after the first multiplication, so that two keys do
// not give shifted sequences of the same numbers.
template <typename Constants, typename W>
TFDIST_INLINE W Mix(const W& word, const W& key = W{}) {
  W x = (word ^ (word >> Constants::kShift1)) * Constants::kFactor1 + key;
  x = (x ^ (x >> Constants::kShift2)) * Constants::kFactor2;
  return x ^ (x >> Constants::kShift3);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_COUNTER_RANDOM_H_
