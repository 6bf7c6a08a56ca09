// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_NUMBER_CODEC_H_
#define TFDIST_CUSTOM_OPS_CODEC_NUMBER_CODEC_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// A lossless code for floating-point numbers of similar magnitude.
//
// Sums of rows and their gradients use few of the exponents that a float can
// have. Each block of numbers contains its largest exponent once. Each number
// contains its distance below this exponent, as a Rice code of about three bits
// instead of eight, and its sign and mantissa unchanged.
//
//   message   varint: count of numbers; then blocks, without gaps
//   block     byte: largest exponent; byte: Rice parameter k; then for each
//             number exponent code, mantissa, sign; padding to a byte at the
//             end
//   exponent  distance >> k zeros, a one, the low k bits; or, for a distance
//             of kEscape << k or more, kEscape zeros, a one, the exponent

// The bit layout of float, bfloat16 or half.
struct NumberFormat {
  int bytes;
  int exponent_bits;
};

// Returns the maximum number of bytes for `count` numbers.
size_t MostPackedBytes(NumberFormat format, size_t count);

// Writes a message of `count` numbers. Returns its end.
uint8_t* PackNumbers(NumberFormat format, const void* numbers, size_t count,
                     uint8_t* out);

// Reads the header of a message: the count of its numbers and the start of its
// blocks. Returns nullptr, or why the message is malformed.
const char* ReadNumberCount(const uint8_t* data, size_t size, uint64_t* count,
                            const uint8_t** blocks);

// Reads the blocks of a message, which must end at `end`. Returns nullptr, or
// why the message is malformed.
const char* UnpackNumbers(NumberFormat format, const uint8_t* blocks,
                          const uint8_t* end, size_t count, void* numbers);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_NUMBER_CODEC_H_
