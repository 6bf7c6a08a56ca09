// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_INT8_CODEC_H_
#define TFDIST_CUSTOM_OPS_CODEC_INT8_CODEC_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// A lossy code of one byte per float, with a scale per block of numbers.
//
//   message   blocks of kInt8Block numbers, the last one of the rest
//   block     float: scale, the largest finite magnitude / 127; then one signed
//             byte q for each number, which stands for q * scale. -128 is NaN.
//
// The size of a message determines the count of its numbers. NaN and infinity
// become NaN and do not change other numbers of their block. Blocks whose scale
// is no normal float (all numbers are below 1.5e-36) become zeros.
constexpr size_t kInt8Block = 64;
constexpr size_t kInt8ScaleBytes = 4;

// Returns the bytes of a message of `count` numbers.
constexpr size_t Int8Bytes(size_t count) {
  return count + (count + kInt8Block - 1) / kInt8Block * kInt8ScaleBytes;
}

// Returns the count of numbers in a message of `bytes`, or -1 if no message has
// this size.
constexpr int64_t Int8Count(size_t bytes) {
  constexpr size_t kBlockBytes = kInt8Block + kInt8ScaleBytes;
  const size_t rest = bytes % kBlockBytes;
  if (rest != 0 && rest <= kInt8ScaleBytes) return -1;
  return static_cast<int64_t>(bytes / kBlockBytes * kInt8Block +
                              (rest == 0 ? 0 : rest - kInt8ScaleBytes));
}

// Writes the blocks of `count` numbers. The error of a number is at most half a
// scale, or less than one scale if rounded at random. `first` is the index of
// the first number, which determines random bits together with the seed.
void EncodeInt8(const float* numbers, size_t count, bool at_random,
                uint64_t seed, uint64_t first, uint8_t* out);

// Reads the blocks of `count` numbers. Returns nullptr, or why a block is
// malformed.
const char* DecodeInt8(const uint8_t* blocks, size_t count, float* numbers);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_INT8_CODEC_H_
