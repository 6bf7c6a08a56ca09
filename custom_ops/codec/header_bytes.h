// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_HEADER_BYTES_H_
#define TFDIST_CUSTOM_OPS_CODEC_HEADER_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "custom_ops/codec/bit_stream.h"

namespace tfdist {

// A varint: seven bits per byte, least significant first. The top bit means
// that more bytes follow.
inline uint8_t* PutVarint(uint64_t value, uint8_t* out) {
  for (; value >= 0x80; value >>= 7) {
    *out++ = static_cast<uint8_t>(value | 0x80);
  }
  *out++ = static_cast<uint8_t>(value);
  return out;
}

// Returns the number of bytes that PutVarint() writes.
inline size_t VarintSize(uint64_t value) {
  size_t size = 1;
  for (; value >= 0x80; value >>= 7) ++size;
  return size;
}

template <typename T>
uint8_t* PutFixed(T value, uint8_t* out) {
  std::memcpy(out, &value, sizeof(T));
  return out + sizeof(T);
}

inline uint8_t* PutCode(const RiceCode& code, uint8_t* out) {
  *out++ = static_cast<uint8_t>(code.k);
  return PutVarint(code.base, out);
}

// Reads header fields from the start of a message. After the first missing
// field, ok() is false and every further field reads as 0.
class HeaderReader {
 public:
  HeaderReader(const uint8_t* data, size_t size)
      : next_(data), end_(data + size) {}

  uint8_t Byte() {
    if (next_ == end_) {
      ok_ = false;
      return 0;
    }
    return *next_++;
  }

  uint64_t Varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint8_t byte = Byte();
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if ((byte & 0x80) == 0) return value;
    }
    ok_ = false;
    return 0;
  }

  template <typename T>
  T Fixed() {
    T value{};
    if (left() < sizeof(T)) {
      ok_ = false;
      return value;
    }
    std::memcpy(&value, next_, sizeof(T));
    next_ += sizeof(T);
    return value;
  }

  // Reads the parameter of a Rice code that cannot be constant.
  int Parameter() {
    const uint8_t k = Byte();
    if (k > RiceCode::kMaxK) ok_ = false;
    return k;
  }

  RiceCode Code() {
    RiceCode code;
    code.k = Byte();
    code.base = Varint();
    if (code.k > RiceCode::kMaxK && code.k != RiceCode::kConstant) ok_ = false;
    return code;
  }

  // Skips `size` bytes. The caller must have checked that they exist.
  void Skip(size_t size) { next_ += size; }

  bool ok() const { return ok_; }
  const uint8_t* next() const { return next_; }
  size_t left() const { return end_ - next_; }

 private:
  const uint8_t* next_;
  const uint8_t* end_;
  bool ok_ = true;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_HEADER_BYTES_H_
