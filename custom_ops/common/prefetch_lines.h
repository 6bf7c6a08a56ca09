// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_PREFETCH_LINES_H_
#define TFDIST_CUSTOM_OPS_COMMON_PREFETCH_LINES_H_

#include <cstdint>

#include "custom_ops/common/target_clones.h"

namespace tfdist {

constexpr int64_t kLineBytes = 64;

// Prefetches the cache lines of `count` elements. Rows are scattered over a
// table that is larger than the caches, so they are prefetched a few rows ahead
// of their use.
template <bool kWrite, typename T>
TFDIST_INLINE void PrefetchLines(const T* first, int64_t count) {
  constexpr int64_t kLine = kLineBytes / sizeof(T);
  for (int64_t at = 0; at < count; at += kLine) {
    __builtin_prefetch(first + at, kWrite);
  }
  // Elements that do not begin with a line reach into one more.
  const auto offset = reinterpret_cast<uintptr_t>(first) % kLineBytes;
  if (offset != 0) __builtin_prefetch(first + count - 1, kWrite);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_PREFETCH_LINES_H_
