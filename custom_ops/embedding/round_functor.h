// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_ROUND_FUNCTOR_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_ROUND_FUNCTOR_H_

#include <cstdint>

namespace tfdist {

// Stochastic rounding: a number between two 16-bit neighbours becomes the upper
// one with the probability that makes the mean the number itself. The random
// bits are a function of the seed and the element's index, so that any thread
// can round any element. NaN and infinity stay what they are.

// Rounds in[begin .. end) to bfloat16; a number above the largest one may
// become infinity.
void RoundToBfloat16(const float* in, uint64_t seed, int64_t begin, int64_t end,
                     uint16_t* out);

// The same for float16, whose numbers below 2^-14 have equal steps of 2^-24.
void RoundToFloat16(const float* in, uint64_t seed, int64_t begin, int64_t end,
                    uint16_t* out);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_ROUND_FUNCTOR_H_
