// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/sum_functor.h"

#include <algorithm>
#include <cstdint>

#include "custom_ops/common/half_floats.h"
#include "tensorflow/core/framework/types.h"

namespace tfdist {

namespace {

// Elements summed at a time. The accumulators fit into the first-level cache,
// and `out` is written only after all inputs of the block have been read.
constexpr size_t kBlock = 1024;

// Accumulators for elements of a type: of the same type, or float.
template <typename T>
struct Summed {
  using Sum = T;
  static const T* Read(const T* in, size_t, T*) { return in; }
  static void Write(const T* sums, size_t count, T* out) {
    std::copy_n(sums, count, out);
  }
};

template <typename T, void (*widen)(const uint16_t*, size_t, float*),
          void (*narrow)(const float*, size_t, uint16_t*)>
struct SummedInFloat {
  using Sum = float;
  static const float* Read(const T* in, size_t count, float* block) {
    widen(reinterpret_cast<const uint16_t*>(in), count, block);
    return block;
  }
  static void Write(const float* sums, size_t count, T* out) {
    narrow(sums, count, reinterpret_cast<uint16_t*>(out));
  }
};

template <>
struct Summed<Eigen::half>
    : SummedInFloat<Eigen::half, WidenFloat16, NarrowToFloat16> {};
template <>
struct Summed<Eigen::bfloat16>
    : SummedInFloat<Eigen::bfloat16, WidenBfloat16, NarrowToBfloat16> {};

// Not cloned for other processors, because their fused multiply-add rounds
// differently. Where every rank computes all sums, the ranks must get the same
// bits.
template <typename T>
void Sum(void* out, const void* const* inputs, const float* weights,
         int input_count, float scale, size_t count) {
  using A = typename Summed<T>::Sum;
  alignas(64) A sums[kBlock];
  alignas(64) A block[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(kBlock, count - begin);
    bool first = true;
    for (int k = 0; k < input_count; ++k) {
      if (weights != nullptr && weights[k] == 0) continue;
      const T* input = static_cast<const T*>(inputs[k]) + begin;
      const A* values = Summed<T>::Read(input, size, block);
      if (weights == nullptr && first) {
        std::copy_n(values, size, sums);
      } else if (weights == nullptr) {
        for (size_t i = 0; i < size; ++i) sums[i] += values[i];
      } else if (const A weight = static_cast<A>(weights[k]); first) {
        for (size_t i = 0; i < size; ++i) sums[i] = weight * values[i];
      } else {
        for (size_t i = 0; i < size; ++i) sums[i] += weight * values[i];
      }
      first = false;
    }
    if (first) std::fill_n(sums, size, A{0});
    if (!first && weights != nullptr) {
      const A factor = static_cast<A>(scale);
      for (size_t i = 0; i < size; ++i) sums[i] *= factor;
    }
    Summed<T>::Write(sums, size, static_cast<T*>(out) + begin);
  }
}

template <typename T>
void AddTo(void* sums, const void* before, const void* input,
           const float* weight, size_t count) {
  using A = typename Summed<T>::Sum;
  alignas(64) A block[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(kBlock, count - begin);
    A* to = static_cast<A*>(sums) + begin;
    const A* from = static_cast<const A*>(before) + begin;
    const T* own = static_cast<const T*>(input) + begin;
    if (weight != nullptr && *weight == 0) {
      for (size_t i = 0; i < size; ++i) to[i] = before ? from[i] : A{0};
      continue;
    }
    const A* values = Summed<T>::Read(own, size, block);
    const A factor = weight != nullptr ? static_cast<A>(*weight) : A{1};
    if (before != nullptr) {
      for (size_t i = 0; i < size; ++i) to[i] = from[i] + factor * values[i];
    } else {
      for (size_t i = 0; i < size; ++i) to[i] = factor * values[i];
    }
  }
}

template <typename T>
void Finish(void* out, const void* sums, const float* scale, size_t count) {
  using A = typename Summed<T>::Sum;
  alignas(64) A block[kBlock];
  const A factor = scale != nullptr ? static_cast<A>(*scale) : A{1};
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(kBlock, count - begin);
    const A* from = static_cast<const A*>(sums) + begin;
    for (size_t i = 0; i < size; ++i) block[i] = factor * from[i];
    Summed<T>::Write(block, size, static_cast<T*>(out) + begin);
  }
}

template <typename T>
PartialSum PartialSumOf() {
  using A = typename Summed<T>::Sum;
  return {sizeof(A), Sum<A>, AddTo<T>, Finish<T>};
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

PartialSum FindPartialSum(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_DOUBLE:
      return PartialSumOf<double>();
    case tensorflow::DT_HALF:
      return PartialSumOf<Eigen::half>();
    case tensorflow::DT_BFLOAT16:
      return PartialSumOf<Eigen::bfloat16>();
    case tensorflow::DT_INT32:
      return PartialSumOf<int32_t>();
    case tensorflow::DT_INT64:
      return PartialSumOf<int64_t>();
    default:
      return PartialSumOf<float>();
  }
}

}  // namespace tfdist
