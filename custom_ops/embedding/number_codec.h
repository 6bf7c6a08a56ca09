// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_NUMBER_CODEC_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_NUMBER_CODEC_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// A lossless code for floating point numbers of similar size.
//
// Sums of rows and their gradients use few of the exponents that a float has
// room for. Per block of numbers the largest exponent is sent once, then for
// every number its distance below that, as a Rice code of about three bits in
// place of eight, and sign and mantissa as they are.
//
//   message   varint: numbers, then blocks, without gaps
//   block     byte: largest exponent; byte: Rice parameter k; then per number
//             exponent code, mantissa, sign; at the end, padding to a byte
//   exponent  distance >> k zeros, a one, the low k bits; or, for a distance
//             of kEscape << k or more, kEscape zeros, a one, the exponent

// float, bfloat16 or half, as bits.
struct NumberFormat {
  int bytes;
  int exponent_bits;
};

// The most bytes that `count` numbers can take.
size_t MostPackedBytes(NumberFormat format, size_t count);

// Writes a message of `count` numbers; returns its end.
uint8_t* PackNumbers(NumberFormat format, const void* numbers, size_t count,
                     uint8_t* out);

// Reads the header of a message: how many numbers it has, and where the blocks
// start. Returns nullptr, or why the message is malformed.
const char* ReadNumberCount(const uint8_t* data, size_t size, uint64_t* count,
                            const uint8_t** blocks);

// Reads the blocks of a message, all of [blocks, end).
const char* UnpackNumbers(NumberFormat format, const uint8_t* blocks,
                          const uint8_t* end, size_t count, void* numbers);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_NUMBER_CODEC_H_
