// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_WIRE_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_CODEC_WIRE_FUNCTOR_GPU_H_

#include <cstdint>

namespace tfdist {

// The 16-bit wire formats. For stochastic rounding, see round_functor.h.
enum class WireType { kFloat16, kBfloat16 };

// These functions convert `count` numbers in device memory. They launch on
// `stream`, a cudaStream_t, do not wait, and return a cudaError_t.
int WidenGpu(WireType type, const uint16_t* in, int64_t count, float* out,
             void* stream);
int NarrowGpu(WireType type, const float* in, int64_t count, uint16_t* out,
              void* stream);
int NarrowAtRandomGpu(WireType type, const float* in, uint64_t seed,
                      int64_t count, uint16_t* out, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_WIRE_FUNCTOR_GPU_H_
