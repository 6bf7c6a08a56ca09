// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/common/group_sort.h"

#include "custom_ops/common/target_clones.h"

namespace tfdist {
namespace {

constexpr int kIndexBits = 31 - kMostGroupBits;
constexpr int64_t kMostKeys = int64_t{1} << kIndexBits;
constexpr int64_t kLanes = 16;

typedef int32_t Words __attribute__((vector_size(kLanes * sizeof(int32_t))));

// The position of a key is the number of smaller keys. Counting them compares
// every pair of keys, but 16 pairs at once, in memory that fits into the
// first-level cache, and without a branch on the data. For a hundred keys, this
// takes less time than three passes of a radix sort.
TFDIST_INLINE void SortGroup(uint64_t* keys, int64_t size, int low_bits) {
  const uint64_t mask = (uint64_t{1} << low_bits) - 1;
  const uint64_t group = keys[0] & ~mask;
  // The index makes equal keys different.
  alignas(sizeof(Words)) int32_t words[kMostKeys];
  for (int64_t i = 0; i < size; ++i) {
    words[i] = static_cast<int32_t>((keys[i] & mask) << kIndexBits | i);
  }
  const int64_t end = (size + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = size; i < end; ++i) words[i] = 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const Words mine = *reinterpret_cast<const Words*>(words + i);
    Words below = {};
    for (int64_t j = 0; j < size; ++j) below -= mine > words[j];
    const int64_t lanes = size - i < kLanes ? size - i : kLanes;
    for (int64_t k = 0; k < lanes; ++k) {
      keys[below[k]] =
          group | static_cast<uint64_t>(words[i + k]) >> kIndexBits;
    }
  }
}

}  // namespace

TFDIST_CLONES
bool SortGroups(uint64_t* keys, int64_t count, int low_bits) {
  for (int64_t begin = 0; begin < count;) {
    const uint64_t group = keys[begin] >> low_bits;
    int64_t end = begin + 1;
    while (end < count && keys[end] >> low_bits == group) ++end;
    if (end - begin > kMostKeys) return false;
    SortGroup(keys + begin, end - begin, low_bits);
    begin = end;
  }
  return true;
}

}  // namespace tfdist
