// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_DECODE_IDS_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_CODEC_DECODE_IDS_FUNCTOR_GPU_H_

#include <cstdint>

#include "custom_ops/codec/id_block.h"

namespace tfdist {

struct GpuIdSection {
  SectionCodes codes;
  uint64_t row_limit;
};

// The sections of all ranks and features, whose headers the host has read. All
// pointers are device memory.
struct GpuDecodeIds {
  const uint8_t* payload;
  const GpuIdSection* sections;
  const IdBlock* blocks;  // ordered by section, and within it
  int64_t block_count;
  DecodedIds to;
  // The index of the first malformed block times 256, plus its IdError;
  // kAllDecoded if no block is malformed. If one is, the other outputs are
  // invalid.
  uint64_t* status;
};

constexpr uint64_t kAllDecoded = ~uint64_t{0};

// Launches one kernel on `stream`, a cudaStream_t, and does not wait. Returns a
// cudaError_t.
int DecodeIdsGpu(const GpuDecodeIds& args, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_DECODE_IDS_FUNCTOR_GPU_H_
