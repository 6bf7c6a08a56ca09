// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_DECODE_IDS_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_DECODE_IDS_FUNCTOR_GPU_H_

#include <cstdint>

#include "custom_ops/embedding/id_block.h"

namespace tfdist {

struct GpuIdSection {
  SectionCodes codes;
  uint64_t row_limit;
};

// Sections of all ranks and features, whose headers the host has read, with all
// pointers in device memory.
struct GpuDecodeIds {
  const uint8_t* payload;
  const GpuIdSection* sections;
  const IdBlock* blocks;  // by section, and in order within it
  int64_t block_count;
  DecodedIds to;
  // Of the first block that is malformed: its number times 256, and its
  // IdError. kAllDecoded without any. What is decoded then is of no use.
  uint64_t* status;
};

constexpr uint64_t kAllDecoded = ~uint64_t{0};

// One launch on `stream`, a cudaStream_t, without waiting. Returns a
// cudaError_t.
int DecodeIdsGpu(const GpuDecodeIds& args, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_DECODE_IDS_FUNCTOR_GPU_H_
