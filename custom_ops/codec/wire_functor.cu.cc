// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/codec/random_rounding.h"
#include "custom_ops/codec/wire_functor_gpu.h"
#include "custom_ops/common/columns.h"
#include "custom_ops/common/half_float_bits.h"
#include "custom_ops/gpu/cuda_threads.h"

namespace tfdist {
namespace {

struct WidenOne {
  WireType type;

  __device__ float operator()(uint16_t number, int64_t) const {
    return type == WireType::kFloat16 ? FromFloat16(number)
                                      : FloatOf(uint32_t{number} << 16);
  }
};

struct NarrowOne {
  WireType type;

  __device__ uint16_t operator()(float number, int64_t) const {
    return type == WireType::kFloat16 ? ToFloat16(number) : ToBfloat16(number);
  }
};

struct NarrowOneAtRandom {
  WireType type;
  uint64_t key;

  __device__ uint16_t operator()(float number, int64_t i) const {
    const uint32_t bits = RandomBits(key, static_cast<uint32_t>(i));
    return type == WireType::kFloat16 ? RandomToFloat16(number, bits)
                                      : RandomToBfloat16(number, bits);
  }
};

// Each thread converts kCount adjacent numbers at a time, with one load and one
// store for all of them.
template <int kCount, typename From, typename To, typename Convert>
__global__ void ConvertKernel(const From* in, int64_t count, Convert convert,
                              To* out) {
  const int64_t pieces = (count + kCount - 1) / kCount;
  for (int64_t i = FirstUnit(); i < pieces; i += UnitStride()) {
    const int64_t first = i * kCount;
    if (first + kCount <= count) {
      const auto from =
          *reinterpret_cast<const Columns<From, kCount>*>(in + first);
      Columns<To, kCount> to;
      for (int k = 0; k < kCount; ++k) {
        to.at[k] = convert(from.at[k], first + k);
      }
      *reinterpret_cast<Columns<To, kCount>*>(out + first) = to;
    } else {
      for (int64_t k = first; k < count; ++k) out[k] = convert(in[k], k);
    }
  }
}

template <typename From, typename To, typename Convert>
int Launch(const From* in, int64_t count, const Convert& convert, To* out,
           void* stream) {
  if (count == 0) return cudaSuccess;
  constexpr int kCount = 4;
  if (IsAligned(in, kCount * sizeof(From)) &&
      IsAligned(out, kCount * sizeof(To))) {
    ConvertKernel<kCount>
        <<<Blocks((count + kCount - 1) / kCount), kBlockThreads, 0,
           StreamOf(stream)>>>(in, count, convert, out);
  } else {
    ConvertKernel<1><<<Blocks(count), kBlockThreads, 0, StreamOf(stream)>>>(
        in, count, convert, out);
  }
  return cudaGetLastError();
}

}  // namespace

int WidenGpu(WireType type, const uint16_t* in, int64_t count, float* out,
             void* stream) {
  return Launch(in, count, WidenOne{type}, out, stream);
}

int NarrowGpu(WireType type, const float* in, int64_t count, uint16_t* out,
              void* stream) {
  return Launch(in, count, NarrowOne{type}, out, stream);
}

int NarrowAtRandomGpu(WireType type, const float* in, uint64_t seed,
                      int64_t count, uint16_t* out, void* stream) {
  const NarrowOneAtRandom convert = {type, RoundingKey(seed)};
  return Launch(in, count, convert, out, stream);
}

}  // namespace tfdist
