// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_HALF_FLOATS_H_
#define TFDIST_CUSTOM_OPS_COMMON_HALF_FLOATS_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// Between floats of 32 and 16 bits, many at a time, by their bits: as
// static_cast of Eigen's types does it, which compilers do not vectorise. To
// the nearest, ties to even; a NaN stays one. Subnormal numbers count, also
// where the processor is told to take them for zeros.
void WidenFloat16(const uint16_t* in, size_t count, float* out);
void WidenBfloat16(const uint16_t* in, size_t count, float* out);
void NarrowToFloat16(const float* in, size_t count, uint16_t* out);
void NarrowToBfloat16(const float* in, size_t count, uint16_t* out);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_HALF_FLOATS_H_
