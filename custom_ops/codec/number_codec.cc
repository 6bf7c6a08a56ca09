// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/codec/number_codec.h"

#include <algorithm>

#include "custom_ops/codec/bit_stream.h"
#include "custom_ops/codec/header_bytes.h"

namespace tfdist {
namespace {

// Small enough that one exponent and one k suit all numbers of a block.
constexpr size_t kBlock = 256;
constexpr int kEscape = 12;
constexpr int kMaxK = 3;
constexpr char kNumbersEnd[] = "it ends before its last number";

template <typename Word, int kExponentBits>
struct Layout {
  static constexpr int kMantissaBits = 8 * sizeof(Word) - 1 - kExponentBits;
  static constexpr int kRestBits = kMantissaBits + 1;
  static constexpr uint32_t kExponentMask = (1u << kExponentBits) - 1;
  static constexpr uint32_t kMantissaMask = (1u << kMantissaBits) - 1;

  static uint32_t Exponent(Word word) {
    return static_cast<uint32_t>(word) >> kMantissaBits & kExponentMask;
  }
  // Returns the mantissa and, above it, the sign.
  static uint32_t Rest(Word word) {
    const uint32_t bits = word;
    return (bits & kMantissaMask) | bits >> (kMantissaBits + kExponentBits)
                                                << kMantissaBits;
  }
  static Word Join(uint32_t exponent, uint32_t rest) {
    return static_cast<Word>(
        (rest & kMantissaMask) | exponent << kMantissaBits |
        rest >> kMantissaBits << (kMantissaBits + kExponentBits));
  }
};

// Returns the k with the shortest codes.
template <typename Word, typename Bits>
int ChooseK(const Word* words, size_t count, uint32_t largest) {
  uint32_t lengths[kMaxK + 1] = {};
  for (size_t i = 0; i < count; ++i) {
    const uint32_t distance = largest - Bits::Exponent(words[i]);
    for (int k = 0; k <= kMaxK; ++k) {
      lengths[k] += k + std::min<uint32_t>(distance >> k, kEscape + 8);
    }
  }
  return static_cast<int>(std::min_element(lengths, lengths + kMaxK + 1) -
                          lengths);
}

template <typename Word, int kExponentBits>
uint8_t* PackBlock(const Word* words, size_t count, uint8_t* out) {
  using Bits = Layout<Word, kExponentBits>;
  uint32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    largest = std::max(largest, Bits::Exponent(words[i]));
  }
  const int k = ChooseK<Word, Bits>(words, count, largest);
  *out++ = static_cast<uint8_t>(largest);
  *out++ = static_cast<uint8_t>(k);
  BitWriter bits(out);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t exponent = Bits::Exponent(words[i]);
    const uint32_t distance = largest - exponent;
    const uint32_t quotient = distance >> k;
    const uint64_t rest = Bits::Rest(words[i]);
    if (quotient < kEscape) {
      const uint64_t low = distance & ((1u << k) - 1);
      const uint64_t code = rest << k | low;
      bits.Put((code << 1 | 1) << quotient, quotient + 1 + k + Bits::kRestBits);
    } else {
      const uint64_t code = rest << kExponentBits | exponent;
      bits.Put((code << 1 | 1) << kEscape,
               kEscape + 1 + kExponentBits + Bits::kRestBits);
    }
  }
  return bits.Finish();
}

template <typename Word, int kExponentBits>
uint8_t* PackAll(const void* numbers, size_t count, uint8_t* out) {
  const Word* words = static_cast<const Word*>(numbers);
  for (size_t i = 0; i < count; i += kBlock) {
    out = PackBlock<Word, kExponentBits>(words + i, std::min(kBlock, count - i),
                                         out);
  }
  return out;
}

// Reads one block and moves *data to its end. Reads nothing past `end`.
template <typename Word, int kExponentBits>
const char* UnpackBlock(const uint8_t** data, const uint8_t* end, size_t count,
                        Word* words) {
  using Bits = Layout<Word, kExponentBits>;
  if (end - *data < 2) return kNumbersEnd;
  const uint32_t largest = (*data)[0];
  const int k = (*data)[1];
  if (k > kMaxK || largest > Bits::kExponentMask) return "a block is malformed";
  const uint8_t* bytes = *data + 2;
  const size_t size = end - bytes;
  size_t position = 0;
  for (size_t i = 0; i < count; ++i) {
    uint64_t word = PeekBits(bytes, size, position);
    const int zeros = __builtin_ctzll(word | uint64_t{1} << (kEscape + 1));
    if (zeros > kEscape) return "an exponent is malformed";
    const bool escaped = zeros == kEscape;
    const int width = escaped ? kExponentBits : k;
    word = word >> zeros >> 1;
    const uint32_t low = word & ((1u << width) - 1);
    const uint32_t rest =
        word >> width & ((uint64_t{1} << Bits::kRestBits) - 1);
    const uint32_t distance = static_cast<uint32_t>(zeros) << k | low;
    if (!escaped && distance > largest) return "an exponent is malformed";
    words[i] = Bits::Join(escaped ? low : largest - distance, rest);
    position += zeros + 1 + width + Bits::kRestBits;
  }
  const size_t read = (position + 7) / 8;
  if (read > size) return kNumbersEnd;
  *data = bytes + read;
  return nullptr;
}

template <typename Word, int kExponentBits>
const char* UnpackAll(const uint8_t* data, const uint8_t* end, size_t count,
                      void* numbers) {
  static_assert(kEscape + 1 + kExponentBits +
                    Layout<Word, kExponentBits>::kRestBits <=
                kPeekBits);
  Word* words = static_cast<Word*>(numbers);
  for (size_t i = 0; i < count; i += kBlock) {
    const char* error = UnpackBlock<Word, kExponentBits>(
        &data, end, std::min(kBlock, count - i), words + i);
    if (error != nullptr) return error;
  }
  return data == end ? nullptr : "its size is wrong";
}

}  // namespace

size_t MostPackedBytes(NumberFormat format, size_t count) {
  const size_t bits = kEscape + 1 + 8 * format.bytes;
  // The writer stores words of 8 bytes.
  return 10 + 8 + (count + kBlock - 1) / kBlock * 3 + (count * bits + 7) / 8;
}

uint8_t* PackNumbers(NumberFormat format, const void* numbers, size_t count,
                     uint8_t* out) {
  out = PutVarint(count, out);
  if (format.bytes == 4) return PackAll<uint32_t, 8>(numbers, count, out);
  if (format.exponent_bits == 8) {
    return PackAll<uint16_t, 8>(numbers, count, out);
  }
  return PackAll<uint16_t, 5>(numbers, count, out);
}

const char* ReadNumberCount(const uint8_t* data, size_t size, uint64_t* count,
                            const uint8_t** blocks) {
  HeaderReader header(data, size);
  *count = header.Varint();
  if (!header.ok()) return "its header is malformed";
  *blocks = header.next();
  // Every number takes more than a byte.
  return *count > size ? kNumbersEnd : nullptr;
}

const char* UnpackNumbers(NumberFormat format, const uint8_t* blocks,
                          const uint8_t* end, size_t count, void* numbers) {
  if (format.bytes == 4) {
    return UnpackAll<uint32_t, 8>(blocks, end, count, numbers);
  }
  if (format.exponent_bits == 8) {
    return UnpackAll<uint16_t, 8>(blocks, end, count, numbers);
  }
  return UnpackAll<uint16_t, 5>(blocks, end, count, numbers);
}

}  // namespace tfdist
