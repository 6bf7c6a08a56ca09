// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_HALF_FLOATS_H_
#define TFDIST_CUSTOM_OPS_COMMON_HALF_FLOATS_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// Conversions of many numbers between 32 and 16 bits, on their bits. The
// results are those of static_cast of Eigen's types, which compilers do not
// vectorize. Numbers are rounded to nearest, ties to even. A NaN remains a NaN.
// Subnormal numbers are converted correctly, even if the processor is set to
// flush them to zero.
void WidenFloat16(const uint16_t* in, size_t count, float* out);
void WidenBfloat16(const uint16_t* in, size_t count, float* out);
void NarrowToFloat16(const float* in, size_t count, uint16_t* out);
void NarrowToBfloat16(const float* in, size_t count, uint16_t* out);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_HALF_FLOATS_H_
