// SPDX-License-Identifier: Apache-2.0
//
// The GPU version of combine_functor.h: one launch for all features. All
// pointers are device memory.
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_COMBINE_FUNCTOR_GPU_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_COMBINE_FUNCTOR_GPU_H_

#include <cstdint>

namespace tfdist {

// One range of columns of a feature's result. Its segments are the samples.
struct GpuCombineBlock {
  int64_t first_segment;
  int64_t width;
  int64_t dim;  // columns of the result
  float* out;   // the first of these columns in the first sample
};

// Segment s is the sum of the rows that begin at parts[firsts[i]], for i in
// [row_splits[s], row_splits[s + 1]), in this order. A segment without rows is
// zero.
struct GpuCombine {
  // Ascending by first_segment, from 0. No block is empty.
  const GpuCombineBlock* blocks;
  int64_t block_count;
  int64_t widest;  // width of the widest block
  int64_t segments;
  const int64_t* row_splits;  // [segments + 1]
  const int64_t* firsts;      // [entries]
  const float* parts;
};

// The results of one owner for one range of columns: a section of
// combine_functor.h.
struct GpuCombineSection {
  int64_t first_entry;
  int64_t first_value;
  int64_t width;
  int64_t dim;        // columns of the gradient
  const float* grad;  // the first of these columns in sample 0
};

// Row k of a section is scale times the columns of sample
// sample_ids[first_entry + k]. If scale is 0, the row is 0 for any gradient.
struct GpuCombineGrad {
  // Ascending by first_entry, from 0. No section is empty.
  const GpuCombineSection* sections;
  int64_t section_count;
  int64_t widest;  // width of the widest section
  int64_t entries;
  const int32_t* sample_ids;  // [entries]
  float scale;
  float* values;
};

// Each function launches one kernel on `stream`, a cudaStream_t, and does not
// wait. Both return a cudaError_t.
int CombineGpu(const GpuCombine& args, void* stream);
int CombineGradGpu(const GpuCombineGrad& args, void* stream);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_COMBINE_FUNCTOR_GPU_H_
