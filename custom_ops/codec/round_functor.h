// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_ROUND_FUNCTOR_H_
#define TFDIST_CUSTOM_OPS_CODEC_ROUND_FUNCTOR_H_

#include <cstdint>

namespace tfdist {

// Stochastic rounding: a number between two adjacent 16-bit numbers is rounded
// to the upper one with such a probability that the expected result is the
// number itself. The random bits are a function of the seed and the element's
// index, so that any thread can round any element. NaN and infinity do not
// change.

// Rounds in[begin .. end) to bfloat16. A number above the largest bfloat16 may
// become infinity.
void RoundToBfloat16(const float* in, uint64_t seed, int64_t begin, int64_t end,
                     uint16_t* out);

// Rounds in[begin .. end) to float16, whose numbers below 2^-14 have equal
// steps of 2^-24.
void RoundToFloat16(const float* in, uint64_t seed, int64_t begin, int64_t end,
                    uint16_t* out);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_ROUND_FUNCTOR_H_
