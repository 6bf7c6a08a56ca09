// SPDX-License-Identifier: Apache-2.0
//
// The standard sort of this library: stable, by counting. For keys that are
// almost in order, see group_sort.h.
#ifndef TFDIST_CUSTOM_OPS_COMMON_RADIX_SORT_H_
#define TFDIST_CUSTOM_OPS_COMMON_RADIX_SORT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "custom_ops/common/target_clones.h"

namespace tfdist {

// Returns the number of bits of `value`; 0 for 0.
inline int BitWidth(uint64_t value) {
  return value == 0 ? 0 : 64 - __builtin_clzll(value);
}

// One pass of a counting sort. The caller passes over the elements twice, in
// the same order: first it calls Count() with the bin of each element, then
// Start(), then Place() for each element. Supports less than 2^32 elements.
class CountingSort {
 public:
  // `places` must have an element per bin, and must outlive this object.
  CountingSort(uint32_t* places, size_t bins) : places_(places), bins_(bins) {
    std::fill_n(places, bins, 0);
  }

  TFDIST_INLINE void Count(uint64_t bin) { ++places_[bin]; }

  // Calls visit(bin, first, size) for each bin in ascending order. The elements
  // of the bin get `size` places, from `first`. Returns the number of all
  // elements.
  template <typename Visit>
  TFDIST_INLINE uint32_t Start(const Visit& visit) {
    uint32_t first = 0;
    for (size_t bin = 0; bin < bins_; ++bin) {
      const uint32_t size = places_[bin];
      visit(bin, first, size);
      places_[bin] = first;
      first += size;
    }
    return first;
  }

  TFDIST_INLINE uint32_t Place(uint64_t bin) { return places_[bin]++; }

 private:
  uint32_t* const places_;
  const size_t bins_;
};

// Keys, and optionally one 32-bit value per key, with spare memory of the same
// size. After a sort, the result is in `keys` and `values`.
struct SortBuffers {
  uint64_t* keys;
  uint64_t* spare_keys;
  uint32_t* values = nullptr;
  uint32_t* spare_values = nullptr;
};

// Sorts by bits [low_bit, high_bit) of the keys. The least significant digit
// comes first. Digits have at most 11 bits, so that the places fit into the L1
// cache.
inline void RadixSort(size_t count, int low_bit, int high_bit,
                      SortBuffers* buffers) {
  constexpr int kMaxDigitBits = 11;
  const int bits = high_bit - low_bit;
  if (bits <= 0 || count < 2) return;
  const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit_bits = (bits + passes - 1) / passes;
  uint32_t places[size_t{1} << kMaxDigitBits];
  for (int shift = low_bit; shift < high_bit; shift += digit_bits) {
    const int width = std::min(digit_bits, high_bit - shift);
    const uint64_t mask = (uint64_t{1} << width) - 1;
    CountingSort pass(places, size_t{1} << width);
    const uint64_t* keys = buffers->keys;
    for (size_t i = 0; i < count; ++i) pass.Count(keys[i] >> shift & mask);
    pass.Start([](size_t, uint32_t, uint32_t) {});
    uint64_t* sorted = buffers->spare_keys;
    if (buffers->values == nullptr) {
      for (size_t i = 0; i < count; ++i) {
        sorted[pass.Place(keys[i] >> shift & mask)] = keys[i];
      }
    } else {
      for (size_t i = 0; i < count; ++i) {
        const uint32_t to = pass.Place(keys[i] >> shift & mask);
        sorted[to] = keys[i];
        buffers->spare_values[to] = buffers->values[i];
      }
    }
    std::swap(buffers->keys, buffers->spare_keys);
    std::swap(buffers->values, buffers->spare_values);
  }
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_RADIX_SORT_H_
