// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_BIT_STREAM_H_
#define TFDIST_CUSTOM_OPS_CODEC_BIT_STREAM_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "custom_ops/common/target_clones.h"

namespace tfdist {

// Bits are packed from the least significant bit of each byte upwards. A Rice
// code of parameter k writes value >> k as that many zeros and a one, then the
// low k bits. This is near optimal for gaps between randomly distributed rows.

// Writes bits to memory of exactly the required size.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : out_(out) {}

  // Appends the low `count` (0 to 63) bits of `value`. Higher bits must be
  // zero.
  void Put(uint64_t value, int count) {
    word_ |= value << fill_;
    const int fill = fill_ + count;
    if (fill >= 64) {
      std::memcpy(out_, &word_, 8);
      out_ += 8;
      word_ = value >> (64 - fill_);
      fill_ = fill - 64;
    } else {
      fill_ = fill;
    }
  }

  void PutRice(uint64_t value, int k) {
    uint64_t quotient = value >> k;
    const uint64_t low = value & ((uint64_t{1} << k) - 1);
    for (; quotient > 15; quotient -= 16) Put(0, 16);
    const int zeros = static_cast<int>(quotient);
    if (zeros + 1 + k < 64) {
      Put((low << 1 | 1) << zeros, zeros + 1 + k);
    } else {
      Put(uint64_t{1} << zeros, zeros + 1);
      Put(low, k);
    }
  }

  // Writes the remaining bits, padded to a byte. Returns the end.
  uint8_t* Finish() {
    const int bytes = (fill_ + 7) / 8;
    std::memcpy(out_, &word_, bytes);
    return out_ + bytes;
  }

 private:
  uint8_t* out_;
  uint64_t word_ = 0;
  int fill_ = 0;
};

// The number of bits that PeekBits() always returns.
constexpr int kPeekBits = 57;

// Returns the bits of [data, data + size) from `position`: kPeekBits bits and
// possibly more. Bits after the end of the data are zero; nothing outside of
// the data is read.
TFDIST_INLINE uint64_t PeekBits(const uint8_t* data, size_t size,
                                uint64_t position) {
  const size_t byte = position / 8;
  uint64_t word = 0;
  if (byte + 8 <= size) {
    std::memcpy(&word, data + byte, 8);
  } else if (byte < size) {
    std::memcpy(&word, data + byte, size - byte);
  }
  return word >> (position % 8);
}

// Returns the number of zeros below the lowest one. `word` must not be 0.
TFDIST_INLINE int TrailingZeros(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(word)) - 1;
#else
  return __builtin_ctzll(word);
#endif
}

// Reads what BitWriter wrote. Never reads outside of [data, data + size). After
// the end, bits are zero and `ok()` returns false.
class BitReader {
 public:
  TFDIST_INLINE BitReader(const uint8_t* data, size_t size)
      : data_(data), size_(size), end_(uint64_t{8} * size) {}

  // Returns the value of one Rice code. At the end of the bits, returns 0 and
  // ok() becomes false.
  TFDIST_INLINE uint64_t GetRice(int k) {
    uint64_t word = Peek();
    uint64_t quotient = 0;
    while ((word & kPeekMask) == 0) {
      quotient += kPeekBits;
      position_ += kPeekBits;
      if (position_ >= end_) return Fail();
      word = Peek();
    }
    const int zeros = TrailingZeros(word);
    quotient += zeros;
    position_ += zeros + 1;
    if (zeros + 1 + k <= kPeekBits) {
      word = word >> zeros >> 1;
    } else {
      word = Peek();
    }
    position_ += k;
    if (position_ > end_) return Fail();
    return quotient << k | (word & ((uint64_t{1} << k) - 1));
  }

  TFDIST_INLINE bool ok() const { return ok_; }

  // Bytes read so far, including the last, partly read byte.
  TFDIST_INLINE size_t bytes_read() const { return (position_ + 7) / 8; }

 private:
  static constexpr uint64_t kPeekMask = (uint64_t{1} << kPeekBits) - 1;

  TFDIST_INLINE uint64_t Peek() const {
    return PeekBits(data_, size_, position_);
  }

  TFDIST_INLINE uint64_t Fail() {
    ok_ = false;
    position_ = end_;
    return 0;
  }

  const uint8_t* data_;
  size_t size_;
  uint64_t end_;
  uint64_t position_ = 0;
  bool ok_ = true;
};

// The code of a list of numbers: `base` is subtracted from each number, which
// is then written as a Rice code of parameter k. kConstant means that all
// numbers equal `base`.
struct RiceCode {
  static constexpr int kConstant = 63;
  static constexpr int kMaxK = 48;

  uint64_t base = 0;
  int k = kConstant;
  uint64_t bits = 0;  // of the entire list

  // Returns the next number of a list.
  TFDIST_INLINE uint64_t Next(BitReader* reader) const {
    return k == kConstant ? base : base + reader->GetRice(k);
  }
};

// Returns the number of bits of a part of a list.
template <typename T>
uint64_t RiceBits(const T* values, size_t count, const RiceCode& code) {
  if (code.k == RiceCode::kConstant) return 0;
  uint64_t bits = count * (code.k + 1);
  for (size_t i = 0; i < count; ++i) bits += (values[i] - code.base) >> code.k;
  return bits;
}

// Returns the shortest Rice code for values[0, count), estimated from their
// mean.
template <typename T>
RiceCode ChooseRice(const T* values, size_t count, uint64_t base) {
  RiceCode code;
  code.base = base;
  if (count == 0) return code;
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += values[i];
  sum -= base * count;
  const uint64_t mean = sum / count;
  const int guess = mean == 0 ? 0 : 63 - __builtin_clzll(mean);
  for (int k = std::max(guess - 1, 0); k <= guess + 1; ++k) {
    RiceCode other;
    other.base = base;
    other.k = k;
    other.bits = RiceBits(values, count, other);
    if (code.k == RiceCode::kConstant || other.bits < code.bits) code = other;
  }
  return code;
}

// Like ChooseRice, with the smallest value as base. Equal values take no bits.
template <typename T>
RiceCode ChooseRiceWithBase(const T* values, size_t count) {
  if (count == 0) return RiceCode();
  const auto range = std::minmax_element(values, values + count);
  if (*range.first == *range.second) {
    RiceCode code;
    code.base = *range.first;
    return code;
  }
  return ChooseRice(values, count, *range.first);
}

template <typename T>
void PutRiceList(const T* values, size_t count, const RiceCode& code,
                 BitWriter* writer) {
  if (code.k == RiceCode::kConstant) return;
  for (size_t i = 0; i < count; ++i) {
    writer->PutRice(values[i] - code.base, code.k);
  }
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_BIT_STREAM_H_
