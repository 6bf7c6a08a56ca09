// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_HASH_KEYS_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_HASH_KEYS_H_

#include <cstdint>

#include "custom_ops/vocabulary/hash_key.h"

namespace tfdist {

// Hashes `count` keys of kWords 64-bit words each, which follow each other in
// memory. The results are those of Key::Hash(). With AVX-512 a key takes a
// quarter of the time, because vectors hold several keys.
template <int kWords>
void HashKeys(const void* keys, int64_t count, const HashKey& key,
              uint64_t* hashes);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_HASH_KEYS_H_
