// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_READ_SEED_H_
#define TFDIST_CUSTOM_OPS_COMMON_READ_SEED_H_

#include <cstdint>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {

// Reads the int64 scalar at `index`, which must be in host memory.
inline absl::Status ReadSeed(tensorflow::OpKernelContext* ctx, int index,
                             uint64_t* seed) {
  const tensorflow::Tensor& input = ctx->input(index);
  if (input.NumElements() != 1) {
    return tensorflow::errors::InvalidArgument(
        "seed must be a scalar. Received shape: ", input.shape().DebugString());
  }
  *seed = static_cast<uint64_t>(*static_cast<const int64_t*>(input.data()));
  return absl::OkStatus();
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_READ_SEED_H_
