// SPDX-License-Identifier: Apache-2.0
//
// combine_functor.h for a GPU: all features in one launch, all pointers in
// device memory.
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_COMBINE_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_COMBINE_FUNCTOR_GPU_H_

#include <cstdint>

namespace tfdist {

// One range of columns of a feature's result. Its segments are the samples.
struct GpuCombineBlock {
  int64_t first_segment;
  int64_t width;
  int64_t dim;  // of the result, from one sample to the next
  float* out;   // where the columns of the first sample begin
};

// Segment s is the sum of the rows that begin at parts[firsts[i]], i in
// [row_splits[s], row_splits[s + 1]), in this order; zeros for none.
struct GpuCombine {
  // Ascending by first_segment, from 0 on. None is empty.
  const GpuCombineBlock* blocks;
  int64_t block_count;
  int64_t widest;  // width of the widest block
  int64_t segments;
  const int64_t* row_splits;  // [segments + 1]
  const int64_t* firsts;      // [entries]
  const float* parts;
};

// What one owner sent for one range of columns: a section of combine_functor.h.
struct GpuCombineSection {
  int64_t first_entry;
  int64_t first_value;
  int64_t width;
  int64_t dim;        // of the gradient, from one sample to the next
  const float* grad;  // where the columns of sample 0 begin
};

// Row k of a section is scale times the columns of sample_ids[first_entry + k];
// zeros for scale 0, whatever these are.
struct GpuCombineGrad {
  // Ascending by first_entry, from 0 on. None is empty.
  const GpuCombineSection* sections;
  int64_t section_count;
  int64_t widest;  // width of the widest section
  int64_t entries;
  const int32_t* sample_ids;  // [entries]
  float scale;
  float* values;
};

// Each is one launch on `stream`, a cudaStream_t, without waiting. Return a
// cudaError_t.
int CombineGpu(const GpuCombine& args, void* stream);
int CombineGradGpu(const GpuCombineGrad& args, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_COMBINE_FUNCTOR_GPU_H_
