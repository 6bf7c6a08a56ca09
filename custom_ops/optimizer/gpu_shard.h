// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_GPU_SHARD_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_GPU_SHARD_H_

#include "custom_ops/gpu/gpu_work.h"
#include "custom_ops/optimizer/shard_access.h"

namespace tfdist {

// ShardAccess::PrepareToWrite for buffers in device memory.
inline absl::Status PrepareToWrite(tensorflow::OpKernelContext* ctx,
                                   const GpuWork& work, ShardAccess* shard) {
  return shard->PrepareToWrite(ctx,
                               [&](const void* from, int64_t bytes, void* to) {
                                 return work.Copy(from, bytes, to);
                               });
}

// Copies rows from host memory to device memory.
template <typename Row>
absl::Status UploadRows(const Row* rows, int64_t count, GpuWork* work,
                        const Row** there) {
  Upload upload(work);
  const size_t at = upload.Add(rows, count);
  TF_RETURN_IF_ERROR(upload.Start());
  *there = upload.At<Row>(at);
  return absl::OkStatus();
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_GPU_SHARD_H_
