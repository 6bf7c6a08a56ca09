// SPDX-License-Identifier: Apache-2.0
//
// Barriers, what the lanes of a warp show each other, and atomics.
#ifndef TFDIST_TESTS_CUDA_ON_CPU_LANES_H_
#define TFDIST_TESTS_CUDA_ON_CPU_LANES_H_

#include <algorithm>
#include <cstring>

#include "tests/cuda_on_cpu/fibers.h"

namespace cuda_on_cpu {

inline int Lane() { return block.current->index % kWarpLanes; }

// Meets the lanes of `mask`; returns what the lane `source` shows.
inline uint64_t Meet(uint32_t mask, uint64_t shown, int source,
                     const char* where) {
  Fiber* me = block.current;
  me->where = where;
  if (!(mask >> Lane() & 1)) Fail(*me, "a lane that its mask does not name");
  me->mask = mask;
  me->source = source;
  me->shown = shown;
  Wait(State::kAtWarp, where);
  return me->seen;
}

// Shuffles stay within sections of `width` lanes; a source outside of its
// section is the lane itself.
template <typename T>
T Shuffle(uint32_t mask, T value, int source, int width, const char* where) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  const int first = Lane() / width * width;
  if (source < first || source >= first + width) source = Lane();
  word = Meet(mask, word, source, where);
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

template <typename T, typename Change>
T Atomic(T* at, const Change& change) {
  MayYield();
  const T before = *at;
  *at = change(before);
  return before;
}

}  // namespace cuda_on_cpu

inline void __syncthreads() {
  cuda_on_cpu::Wait(cuda_on_cpu::State::kAtBlock, "__syncthreads");
}

inline void __syncwarp(unsigned mask = ~0u) {
  cuda_on_cpu::Meet(mask, 0, cuda_on_cpu::kAllLanes, "__syncwarp");
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(cuda_on_cpu::Meet(
      mask, predicate != 0, cuda_on_cpu::kAllLanes, "__ballot_sync"));
}

inline int __any_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  const int first = cuda_on_cpu::Lane() / width * width;
  return cuda_on_cpu::Shuffle(mask, value, first + lane % width, width,
                              "__shfl_sync");
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return cuda_on_cpu::Shuffle(mask, value, cuda_on_cpu::Lane() ^ bits, width,
                              "__shfl_xor_sync");
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, int by, int width = 32) {
  return cuda_on_cpu::Shuffle(mask, value, cuda_on_cpu::Lane() - by, width,
                              "__shfl_up_sync");
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, int by, int width = 32) {
  return cuda_on_cpu::Shuffle(mask, value, cuda_on_cpu::Lane() + by, width,
                              "__shfl_down_sync");
}

template <typename T>
T atomicAdd(T* at, T value) {
  return cuda_on_cpu::Atomic(at, [&](T before) { return before + value; });
}

template <typename T>
T atomicMin(T* at, T value) {
  return cuda_on_cpu::Atomic(at,
                             [&](T before) { return std::min(before, value); });
}

template <typename T>
T atomicMax(T* at, T value) {
  return cuda_on_cpu::Atomic(at,
                             [&](T before) { return std::max(before, value); });
}

template <typename T>
T atomicCAS(T* at, T expected, T value) {
  return cuda_on_cpu::Atomic(
      at, [&](T before) { return before == expected ? value : before; });
}

#endif  // TFDIST_TESTS_CUDA_ON_CPU_LANES_H_
