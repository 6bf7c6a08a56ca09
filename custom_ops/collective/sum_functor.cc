// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/collective/sum_functor.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "tensorflow/core/framework/types.h"

namespace tfdist {

namespace {

// Elements summed at a time: the accumulators stay in the first-level cache,
// and `out` is written only after all inputs of the block have been read.
constexpr size_t kBlock = 1024;

template <typename T>
using Accumulator =
    std::conditional_t<std::is_same<T, Eigen::half>::value ||
                           std::is_same<T, Eigen::bfloat16>::value,
                       float, T>;

template <typename T>
void Sum(void* out, const void* const* inputs, const float* weights,
         int input_count, float scale, size_t count) {
  using A = Accumulator<T>;
  alignas(64) A sums[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(kBlock, count - begin);
    bool first = true;
    for (int k = 0; k < input_count; ++k) {
      const T* input = static_cast<const T*>(inputs[k]) + begin;
      if (weights == nullptr && first) {
        for (size_t i = 0; i < size; ++i) sums[i] = static_cast<A>(input[i]);
      } else if (weights == nullptr) {
        for (size_t i = 0; i < size; ++i) sums[i] += static_cast<A>(input[i]);
      } else if (weights[k] == 0) {
        continue;
      } else if (const A weight = static_cast<A>(weights[k]); first) {
        for (size_t i = 0; i < size; ++i) {
          sums[i] = weight * static_cast<A>(input[i]);
        }
      } else {
        for (size_t i = 0; i < size; ++i) {
          sums[i] += weight * static_cast<A>(input[i]);
        }
      }
      first = false;
    }
    T* result = static_cast<T*>(out) + begin;
    if (first) {
      std::fill(result, result + size, static_cast<T>(0));
    } else if (weights == nullptr) {
      for (size_t i = 0; i < size; ++i) result[i] = static_cast<T>(sums[i]);
    } else {
      const A factor = static_cast<A>(scale);
      for (size_t i = 0; i < size; ++i) {
        result[i] = static_cast<T>(factor * sums[i]);
      }
    }
  }
}

}  // namespace

SumFunction FindSum(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_FLOAT:
      return Sum<float>;
    case tensorflow::DT_DOUBLE:
      return Sum<double>;
    case tensorflow::DT_HALF:
      return Sum<Eigen::half>;
    case tensorflow::DT_BFLOAT16:
      return Sum<Eigen::bfloat16>;
    case tensorflow::DT_INT32:
      return Sum<int32_t>;
    case tensorflow::DT_INT64:
      return Sum<int64_t>;
    default:
      return nullptr;
  }
}

}  // namespace tfdist
