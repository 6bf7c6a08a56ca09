// SPDX-License-Identifier: Apache-2.0
#if TFDIST_CUDA
#include "custom_ops/gpu/gpu_call.h"
#include "tensorflow/core/framework/device_base.h"
#include "xla/stream_executor/stream.h"

namespace tfdist {

cudaStream_t StreamOf(tensorflow::OpKernelContext* ctx) {
  return static_cast<cudaStream_t>(
      ctx->op_device_context()->stream()->platform_specific_handle().stream);
}

}  // namespace tfdist
#endif  // TFDIST_CUDA
