// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_ROW_VECTORS_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_ROW_VECTORS_H_

#include <cstdint>

#include "custom_ops/common/prefetch_lines.h"
#include "custom_ops/common/target_clones.h"
#include "custom_ops/lookup/lookup_functor.h"

namespace tfdist {

// `kLanes` numbers at any address. The compiler splits vectors that are larger
// than the processor's registers.
template <typename T, int kLanes>
struct Vector {
  typedef T Type __attribute__((vector_size(kLanes * sizeof(T)),
                                aligned(alignof(T)), may_alias));
};

template <int kLanes>
using Floats = typename Vector<float, kLanes>::Type;

// Returns the vector by reference, because a returned vector would be part of
// the ABI.
template <int kLanes>
TFDIST_INLINE void Load(const float* from, Floats<kLanes>* values) {
  *values = *reinterpret_cast<const Floats<kLanes>*>(from);
}

template <int kLanes>
TFDIST_INLINE void Load(const Bfloat16* from, Floats<kLanes>* values) {
  using Halves = typename Vector<uint16_t, kLanes>::Type;
  using Words = typename Vector<uint32_t, kLanes>::Type;
  const Words words =
      __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words);
  *values = reinterpret_cast<Floats<kLanes>>(words << 16);
}

constexpr int kMaxVectors = 8;          // accumulators that fit into registers
constexpr int64_t kPrefetchAhead = 16;  // entries; hides the latency of memory

// Prefetches a row, but only the start of a long row. The processor's own
// prefetcher continues to the end of the row. It can have only a limited number
// of outstanding misses, so prefetching all lines of long rows takes up to a
// third longer.
template <typename T>
TFDIST_INLINE void PrefetchRow(const T* row, int64_t width) {
  constexpr int64_t kLine = kLineBytes / sizeof(T);
  constexpr int64_t kShort = 4 * kLine;
  PrefetchLines<false>(row, width > kShort ? kLine + 1 : width);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_ROW_VECTORS_H_
