// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_BIT_STREAM_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_BIT_STREAM_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "custom_ops/common/target_clones.h"

namespace tfdist {

// Bits are packed from the least significant bit of each byte upwards. A Rice
// code of parameter k writes value >> k as that many zeros and a one, then the
// low k bits: near optimal for gaps between randomly spread rows.

// Writes bits to memory the caller has sized exactly.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : out_(out) {}

  // Appends the low `count` (0..63) bits of `value`; higher bits must be zero.
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

  // Writes what is pending, padded to a whole byte; returns the end.
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

// Bits that PeekBits() has for sure.
constexpr int kPeekBits = 57;

// The bits of [data, data + size) from `position` on, kPeekBits of them and
// some more; zeros follow the end of the data, nothing outside of it is read.
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

// How many zeros are below the lowest one; `word` is not 0.
TFDIST_INLINE int TrailingZeros(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(word)) - 1;
#else
  return __builtin_ctzll(word);
#endif
}

// Reads what BitWriter wrote. Never reads outside [data, data + size): past the
// end, bits are zero and `ok()` turns false.
class BitReader {
 public:
  TFDIST_INLINE BitReader(const uint8_t* data, size_t size)
      : data_(data), size_(size), end_(uint64_t{8} * size) {}

  // The value of one Rice code, or 0 with ok() false when the bits run out.
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

  // Bytes touched so far, the last one counted whole.
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

// How a list of numbers is coded: `base` is subtracted, then Rice codes of
// parameter k follow; kConstant says that all numbers equal `base`.
struct RiceCode {
  static constexpr int kConstant = 63;
  static constexpr int kMaxK = 48;

  uint64_t base = 0;
  int k = kConstant;
  uint64_t bits = 0;  // of the whole list

  // The next number of a list.
  TFDIST_INLINE uint64_t Next(BitReader* reader) const {
    return k == kConstant ? base : base + reader->GetRice(k);
  }
};

// Bits of a part of a list.
template <typename T>
uint64_t RiceBits(const T* values, size_t count, const RiceCode& code) {
  if (code.k == RiceCode::kConstant) return 0;
  uint64_t bits = count * (code.k + 1);
  for (size_t i = 0; i < count; ++i) bits += (values[i] - code.base) >> code.k;
  return bits;
}

// The cheapest Rice code for values[0, count), found from their mean.
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

// As above with the smallest value as base; equal values cost nothing.
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

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_BIT_STREAM_H_
