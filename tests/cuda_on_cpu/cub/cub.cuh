// SPDX-License-Identifier: Apache-2.0
//
// The two algorithms of CUB that the kernels call, with the same arguments and
// the same two calls each: the first one asks for the bytes of scratch memory.
#ifndef TFDIST_TESTS_CUDA_ON_CPU_CUB_CUB_CUH_
#define TFDIST_TESTS_CUDA_ON_CPU_CUB_CUB_CUH_

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "tests/cuda_on_cpu/cuda_runtime.h"

namespace cub {

// Whether this is the call that asks. Scratch memory is written, as by CUB.
inline bool Asks(void* scratch, size_t* bytes, size_t needed) {
  if (scratch == nullptr) {
    *bytes = needed;
    return true;
  }
  std::memset(scratch, 0xA5, needed);
  return false;
}

struct DeviceRadixSort {
  template <typename Key, typename Value>
  static cudaError_t SortPairs(void* scratch, size_t& bytes, const Key* keys,
                               Key* sorted_keys, const Value* values,
                               Value* sorted_values, int count, int begin_bit,
                               int end_bit, cudaStream_t) {
    if (Asks(scratch, &bytes, count * sizeof(Key) + 1)) return cudaSuccess;
    if (bytes < count * sizeof(Key) + 1) return cudaErrorInvalidValue;
    const Key mask = end_bit - begin_bit == 8 * sizeof(Key)
                         ? ~Key{0}
                         : ((Key{1} << (end_bit - begin_bit)) - 1) << begin_bit;
    std::vector<int> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return (keys[a] & mask) < (keys[b] & mask);
    });
    for (int i = 0; i < count; ++i) {
      sorted_keys[i] = keys[order[i]];
      sorted_values[i] = values[order[i]];
    }
    return cudaSuccess;
  }
};

struct DeviceScan {
  template <typename T>
  static cudaError_t InclusiveSum(void* scratch, size_t& bytes, const T* in,
                                  T* out, int count, cudaStream_t) {
    if (Asks(scratch, &bytes, count + 1)) return cudaSuccess;
    if (bytes < static_cast<size_t>(count) + 1) return cudaErrorInvalidValue;
    std::partial_sum(in, in + count, out);
    return cudaSuccess;
  }
};

}  // namespace cub

#endif  // TFDIST_TESTS_CUDA_ON_CPU_CUB_CUB_CUH_
