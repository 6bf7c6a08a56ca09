// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/codec/int8_codec.h"

#include <algorithm>
#include <cfloat>
#include <cstring>

#include "custom_ops/codec/random_rounding.h"
#include "custom_ops/common/float_bits.h"
#include "custom_ops/common/target_clones.h"

namespace tfdist {
namespace {

constexpr float kLargestCode = 127.0f;
constexpr int8_t kNotFinite = -128;
// The largest scale whose product with 127 is finite.
constexpr float kLargestScale = 0x1.020406p+121f;

// Returns the magnitude of a number, 0 for NaN and infinity.
TFDIST_INLINE float FiniteMagnitude(float value) {
  const uint32_t magnitude = BitsOf(value) & ~kSign;
  return FloatOf(magnitude < kInfinity ? magnitude : 0);
}

// Rounds a block. `offset` returns what is added to a number of scales before
// it is rounded down: 0.5, or a random number of [0, 1).
template <typename Offset>
TFDIST_INLINE void EncodeBlock(const float* numbers, size_t count,
                               const Offset& offset, uint8_t* out) {
  float largest = 0.0f;
  for (size_t i = 0; i < count; ++i) {
    largest = std::max(largest, FiniteMagnitude(numbers[i]));
  }
  float scale = std::min(largest / kLargestCode, kLargestScale);
  if (scale < FLT_MIN) scale = 0.0f;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  std::memcpy(out, &scale, kInt8ScaleBytes);
  auto* codes = reinterpret_cast<int8_t*>(out + kInt8ScaleBytes);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = BitsOf(numbers[i]);
    const bool finite = (bits & ~kSign) < kInfinity;
    const float steps = FloatOf(finite ? bits : 0) * inverse + offset(i);
    const int32_t whole = static_cast<int32_t>(steps);
    int32_t code = whole - (steps < static_cast<float>(whole) ? 1 : 0);
    // The quotient of the largest number may be rounded to above 127.
    code = std::min(std::max(code, -127), 127);
    codes[i] = finite ? static_cast<int8_t>(code) : kNotFinite;
  }
}

}  // namespace

TFDIST_CLONES
void EncodeInt8(const float* numbers, size_t count, bool at_random,
                uint64_t seed, uint64_t first, uint8_t* out) {
  const uint64_t key = RoundingKey(seed);
  for (size_t begin = 0; begin < count; begin += kInt8Block) {
    const size_t size = std::min(kInt8Block, count - begin);
    if (at_random) {
      const auto start = static_cast<uint32_t>(first + begin);
      EncodeBlock(
          numbers + begin, size,
          [key, start](size_t i) {
            const uint32_t random =
                RandomBits(key, start + static_cast<uint32_t>(i));
            return static_cast<float>(static_cast<int32_t>(random >> 8)) *
                   0x1p-24f;
          },
          out);
    } else {
      EncodeBlock(numbers + begin, size, [](size_t) { return 0.5f; }, out);
    }
    out += kInt8ScaleBytes + size;
  }
}

TFDIST_CLONES
const char* DecodeInt8(const uint8_t* blocks, size_t count, float* numbers) {
  const float not_a_number = FloatOf(0x7FC00000);
  for (size_t begin = 0; begin < count; begin += kInt8Block) {
    const size_t size = std::min(kInt8Block, count - begin);
    float scale;
    std::memcpy(&scale, blocks, kInt8ScaleBytes);
    // Not `scale < 0`, which is false for NaN.
    if (!(scale >= 0.0f && scale <= kLargestScale)) {
      return "the scale of a block is negative, not finite or too large";
    }
    const auto* codes =
        reinterpret_cast<const int8_t*>(blocks) + kInt8ScaleBytes;
    float* to = numbers + begin;
    for (size_t i = 0; i < size; ++i) {
      const float value = static_cast<float>(codes[i]) * scale;
      to[i] = codes[i] == kNotFinite ? not_a_number : value;
    }
    blocks += kInt8ScaleBytes + size;
  }
  return nullptr;
}

}  // namespace tfdist
