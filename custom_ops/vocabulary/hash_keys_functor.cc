// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>

#include "custom_ops/common/target_clones.h"
#include "custom_ops/vocabulary/hash_keys.h"

namespace tfdist {
namespace {

template <int kWords>
TFDIST_INLINE void HashAll(const void* keys, int64_t count, const HashKey& key,
                           uint64_t* hashes) {
  const HashKey secret = key;
  const char* const bytes = static_cast<const char*>(keys);
  uint64_t words[kWords];
  if (secret.IsZero()) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(words, bytes + i * sizeof(words), sizeof(words));
      hashes[i] = HashWithoutSecret(words[0]);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(words, bytes + i * sizeof(words), sizeof(words));
    hashes[i] = SipHash(words, secret);
  }
}

TFDIST_CLONES void HashIds(const void* keys, int64_t count, const HashKey& key,
                           uint64_t* hashes) {
  HashAll<1>(keys, count, key, hashes);
}

TFDIST_CLONES void HashFingerprints(const void* keys, int64_t count,
                                    const HashKey& key, uint64_t* hashes) {
  HashAll<2>(keys, count, key, hashes);
}

}  // namespace

template <>
void HashKeys<1>(const void* keys, int64_t count, const HashKey& key,
                 uint64_t* hashes) {
  HashIds(keys, count, key, hashes);
}

template <>
void HashKeys<2>(const void* keys, int64_t count, const HashKey& key,
                 uint64_t* hashes) {
  HashFingerprints(keys, count, key, hashes);
}

}  // namespace tfdist
