// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_RADIX_SORT_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_RADIX_SORT_H_

#include <cstddef>
#include <cstdint>
#include <utility>

namespace tfdist {

// Number of bits needed to write `value`; 0 for 0.
inline int BitWidth(uint64_t value) {
  return value == 0 ? 0 : 64 - __builtin_clzll(value);
}

// Keys, and optionally one 32-bit value per key, with room of the same size to
// move them to. After a sort the result is in `keys` and `values`.
struct SortBuffers {
  uint64_t* keys;
  uint64_t* spare_keys;
  uint32_t* values = nullptr;
  uint32_t* spare_values = nullptr;
};

// Sorts stably by bits [low_bit, high_bit) of the keys: least significant digit
// first, digits of at most 11 bits so that the counters stay in the L1 cache.
inline void RadixSort(size_t count, int low_bit, int high_bit,
                      SortBuffers* buffers) {
  constexpr int kMaxDigitBits = 11;
  const int bits = high_bit - low_bit;
  if (bits <= 0 || count < 2) return;
  const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit_bits = (bits + passes - 1) / passes;
  const size_t bins = size_t{1} << digit_bits;
  uint32_t offsets[size_t{1} << kMaxDigitBits];
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = low_bit + pass * digit_bits;
    const int width =
        digit_bits < high_bit - shift ? digit_bits : high_bit - shift;
    const uint64_t mask = (uint64_t{1} << width) - 1;
    for (size_t bin = 0; bin < bins; ++bin) offsets[bin] = 0;
    const uint64_t* keys = buffers->keys;
    for (size_t i = 0; i < count; ++i) ++offsets[keys[i] >> shift & mask];
    uint32_t offset = 0;
    for (size_t bin = 0; bin < bins; ++bin) {
      const uint32_t size = offsets[bin];
      offsets[bin] = offset;
      offset += size;
    }
    uint64_t* sorted = buffers->spare_keys;
    if (buffers->values == nullptr) {
      for (size_t i = 0; i < count; ++i) {
        sorted[offsets[keys[i] >> shift & mask]++] = keys[i];
      }
    } else {
      for (size_t i = 0; i < count; ++i) {
        const uint32_t to = offsets[keys[i] >> shift & mask]++;
        sorted[to] = keys[i];
        buffers->spare_values[to] = buffers->values[i];
      }
    }
    std::swap(buffers->keys, buffers->spare_keys);
    std::swap(buffers->values, buffers->spare_values);
  }
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_RADIX_SORT_H_
