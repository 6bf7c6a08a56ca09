// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/common/half_floats.h"

#include "custom_ops/common/half_float_bits.h"
#include "custom_ops/common/target_clones.h"

namespace tfdist {

TFDIST_CLONES
void WidenFloat16(const uint16_t* in, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = FromFloat16(in[i]);
}

TFDIST_CLONES
void WidenBfloat16(const uint16_t* in, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = FloatOf(uint32_t{in[i]} << 16);
}

TFDIST_CLONES
void NarrowToFloat16(const float* in, size_t count, uint16_t* out) {
  for (size_t i = 0; i < count; ++i) out[i] = ToFloat16(in[i]);
}

TFDIST_CLONES
void NarrowToBfloat16(const float* in, size_t count, uint16_t* out) {
  for (size_t i = 0; i < count; ++i) out[i] = ToBfloat16(in[i]);
}

}  // namespace tfdist
