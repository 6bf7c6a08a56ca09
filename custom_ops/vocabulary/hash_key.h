// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_HASH_KEY_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_HASH_KEY_H_

#include <cstdint>

#include "custom_ops/common/target_clones.h"

namespace tfdist {

// The secret of a table's hash. Without it, an attacker cannot choose ids that
// share a bucket. It is the same on all ranks, and is saved with the keys.
//
// A zero key selects the hash without a secret that earlier versions used.
// Their checkpoints need this hash, because it determines the row of each key.
struct HashKey {
  uint64_t words[2] = {0, 0};

  bool IsZero() const { return words[0] == 0 && words[1] == 0; }
};

// SipHash-1-3 of 64-bit words: "SipHash: a fast short-input PRF", Aumasson and
// Bernstein 2012, with one round per word and three at the end, as in the hash
// tables of Rust and CPython.
template <int kWords>
TFDIST_INLINE uint64_t SipHash(const uint64_t (&words)[kWords],
                               const HashKey& key) {
  uint64_t a = key.words[0] ^ 0x736F6D6570736575;
  uint64_t b = key.words[1] ^ 0x646F72616E646F6D;
  uint64_t c = key.words[0] ^ 0x6C7967656E657261;
  uint64_t d = key.words[1] ^ 0x7465646279746573;
  const auto rotate = [](uint64_t x, int bits) TFDIST_ALWAYS {
    return x << bits | x >> (64 - bits);
  };
  const auto round = [&]() TFDIST_ALWAYS {
    a += b, b = rotate(b, 13) ^ a, a = rotate(a, 32);
    c += d, d = rotate(d, 16) ^ c;
    a += d, d = rotate(d, 21) ^ a;
    c += b, b = rotate(b, 17) ^ c, c = rotate(c, 32);
  };
  const auto add = [&](uint64_t word) TFDIST_ALWAYS {
    d ^= word;
    round();
    a ^= word;
  };
  for (const uint64_t word : words) add(word);
  add(uint64_t{8 * kWords} << 56);  // the length in bytes
  c ^= 0xFF;
  for (int i = 0; i < 3; ++i) round();
  return a ^ b ^ c ^ d;
}

// The hash of the first word of a key for a zero HashKey.
TFDIST_INLINE uint64_t HashWithoutSecret(uint64_t x) {
  // The finalizer of MurmurHash3 in 64 bits, which is invertible.
  x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD;
  x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53;
  return x ^ x >> 33;
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_HASH_KEY_H_
