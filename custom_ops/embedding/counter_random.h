// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_COUNTER_RANDOM_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_COUNTER_RANDOM_H_

#include <array>
#include <cmath>
#include <cstdint>

namespace tfdist {

// Random numbers as a function of a counter: no state, so any rank can draw any
// element of a table by itself, in any order.

// Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", 2011): four words of random bits for a key and a counter.
inline std::array<uint32_t, 4> Philox(uint64_t key, uint64_t counter_low,
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

// The value below which a standard normal variable falls with `probability`, in
// (0, 1). Algorithm AS 241 (Wichura 1988), PPND7: accurate to about 1e-7.
inline double NormalQuantile(double probability) {
  const double q = probability - 0.5;
  if (std::abs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q *
           (((5.9109374720e1 * r + 1.5929113202e2) * r + 5.0434271938e1) * r +
            3.3871327179) /
           (((6.7187563600e1 * r + 7.8757757664e1) * r + 1.7895169469e1) * r +
            1.0);
  }
  const double tail = q < 0 ? probability : 1 - probability;
  double r = std::sqrt(-std::log(tail));
  double value;
  if (r <= 5) {
    r -= 1.6;
    value = (((1.7023821103e-1 * r + 1.3067284816) * r + 2.7568153900) * r +
             1.4234372777) /
            ((1.2021132975e-1 * r + 7.3700164250e-1) * r + 1.0);
  } else {
    r -= 5;
    value = (((1.7337203997e-2 * r + 4.2868294337e-1) * r + 3.0812263860) * r +
             6.6579051150) /
            ((1.2258202635e-2 * r + 2.4197894225e-1) * r + 1.0);
  }
  return q < 0 ? -value : value;
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_COUNTER_RANDOM_H_
