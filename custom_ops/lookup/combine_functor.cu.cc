// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/gpu/cuda_threads.h"
#include "custom_ops/lookup/combine_functor_gpu.h"

namespace tfdist {
namespace {

// A group of threads computes the columns of one sample at a time. Each thread
// computes every group-th column, so that adjacent threads access adjacent
// memory.
__global__ void CombineKernel(GpuCombine args, int group) {
  for (int64_t s = FirstUnit(group); s < args.segments;
       s += UnitStride(group)) {
    const GpuCombineBlock block =
        args.blocks[LastBegun(args.block_count, s, [&](int64_t i) {
          return args.blocks[i].first_segment;
        })];
    float* out = block.out + (s - block.first_segment) * block.dim;
    const int64_t begin = args.row_splits[s];
    const int64_t end = args.row_splits[s + 1];
    for (int64_t column = threadIdx.x % group; column < block.width;
         column += group) {
      // The sum starts with the first row, because adding it to 0 would change
      // -0 to +0.
      float sum = begin < end ? args.parts[args.firsts[begin] + column] : 0;
      for (int64_t i = begin + 1; i < end; ++i) {
        sum += args.parts[args.firsts[i] + column];
      }
      out[column] = sum;
    }
  }
}

// A group of threads computes one row of the gradient at a time. Each thread
// computes every group-th column.
__global__ void CombineGradKernel(GpuCombineGrad args, int group) {
  for (int64_t i = FirstUnit(group); i < args.entries; i += UnitStride(group)) {
    const GpuCombineSection section =
        args.sections[LastBegun(args.section_count, i, [&](int64_t k) {
          return args.sections[k].first_entry;
        })];
    const float* from = section.grad + args.sample_ids[i] * section.dim;
    float* to = args.values + section.first_value +
                (i - section.first_entry) * section.width;
    for (int64_t column = threadIdx.x % group; column < section.width;
         column += group) {
      to[column] = args.scale == 0 ? 0 : from[column] * args.scale;
    }
  }
}

}  // namespace

int CombineGpu(const GpuCombine& args, void* stream) {
  if (args.segments == 0 || args.widest == 0) return cudaSuccess;
  const int group = GroupOf(args.widest);
  CombineKernel<<<Blocks(args.segments, group), kBlockThreads, 0,
                  StreamOf(stream)>>>(args, group);
  return cudaGetLastError();
}

int CombineGradGpu(const GpuCombineGrad& args, void* stream) {
  if (args.entries == 0 || args.widest == 0) return cudaSuccess;
  const int group = GroupOf(args.widest);
  CombineGradKernel<<<Blocks(args.entries, group), kBlockThreads, 0,
                      StreamOf(stream)>>>(args, group);
  return cudaGetLastError();
}

}  // namespace tfdist
