// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_SEGMENT_SUM_GPU_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_SEGMENT_SUM_GPU_H_

#include <vector>

#include "custom_ops/gpu/gpu_work.h"
#include "custom_ops/lookup/lookup_functor.h"
#include "custom_ops/lookup/lookup_functor_gpu.h"

namespace tfdist {

// Sums segments of rows of a matrix on the GPU, as a lookup in one table.
// `table` and `out` are device memory; the other arrays are host memory. All
// rows must be within the table.
inline absl::Status SumSegmentsGpu(const SegmentSum& sum, int64_t table_rows,
                                   int64_t segments, GpuWork* work) {
  if (segments == 0) return absl::OkStatus();
  const int64_t entries = sum.row_splits[segments];
  const std::vector<GpuLookupBlock> block = {
      {sum.table, false, table_rows, sum.width, 0, sum.out}};
  Upload upload(work);
  const size_t block_at = upload.Add(block);
  const size_t splits_at = upload.Add(sum.row_splits, segments + 1);
  const size_t rows_at = upload.Add(sum.rows, entries);
  const bool weighted = sum.weights != nullptr;
  const size_t weights_at = upload.Add(sum.weights, weighted ? entries : 0);
  TF_RETURN_IF_ERROR(upload.Start());
  const GpuLookup args = {upload.At<GpuLookupBlock>(block_at),
                          1,
                          sum.width,
                          segments,
                          upload.At<int64_t>(splits_at),
                          upload.At<int64_t>(rows_at),
                          weighted ? upload.At<float>(weights_at) : nullptr,
                          Combiner::kSum};
  return work->Launched(LookupGpu(args, work->stream()));
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_SEGMENT_SUM_GPU_H_
