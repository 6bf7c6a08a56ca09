// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/codec/decode_ids_functor_gpu.h"
#include "custom_ops/gpu/cuda_threads.h"

namespace tfdist {
namespace {

// Each thread decodes entire blocks of ids.
__global__ void DecodeIdsKernel(GpuDecodeIds args) {
  if (FirstUnit() == 0) args.to.row_splits[0] = 0;
  for (int64_t b = FirstUnit(); b < args.block_count; b += UnitStride()) {
    const IdBlock block = args.blocks[b];
    const GpuIdSection section = args.sections[block.section];
    const IdError error = ReadBlock(section.codes, block, section.row_limit,
                                    args.payload, args.to);
    if (error == IdError::kNone) continue;
    atomicMin(reinterpret_cast<unsigned long long*>(args.status),
              static_cast<unsigned long long>(b) << 8 |
                  static_cast<unsigned long long>(error));
  }
}

}  // namespace

int DecodeIdsGpu(const GpuDecodeIds& args, void* stream_pointer) {
  const cudaStream_t stream = StreamOf(stream_pointer);
  const int error =
      cudaMemsetAsync(args.status, 0xFF, sizeof(kAllDecoded), stream);
  if (error != cudaSuccess) return error;
  // There are few threads, and each takes long. Blocks of one warp spread them
  // over as many processors as possible.
  DecodeIdsKernel<<<Blocks(args.block_count, kBlockThreads / kWarpThreads),
                    kWarpThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tfdist
