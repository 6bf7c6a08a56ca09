// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/codec/round_functor.h"

#include "custom_ops/codec/random_rounding.h"
#include "custom_ops/common/target_clones.h"

namespace tfdist {

TFDIST_CLONES
void RoundToBfloat16(const float* in, uint64_t seed, int64_t begin, int64_t end,
                     uint16_t* out) {
  const uint64_t key = RoundingKey(seed);
  for (int64_t i = begin; i < end; ++i) {
    out[i] = RandomToBfloat16(in[i], RandomBits(key, static_cast<uint32_t>(i)));
  }
}

TFDIST_CLONES
void RoundToFloat16(const float* in, uint64_t seed, int64_t begin, int64_t end,
                    uint16_t* out) {
  const uint64_t key = RoundingKey(seed);
  for (int64_t i = begin; i < end; ++i) {
    out[i] = RandomToFloat16(in[i], RandomBits(key, static_cast<uint32_t>(i)));
  }
}

}  // namespace tfdist
