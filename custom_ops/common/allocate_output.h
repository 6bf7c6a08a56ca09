// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_ALLOCATE_OUTPUT_H_
#define TFDIST_CUSTOM_OPS_COMMON_ALLOCATE_OUTPUT_H_

#include <cstdint>
#include <initializer_list>

#include "absl/status/status.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tfdist {

// Like OpKernelContext::allocate_output, for dimensions from users or peers.
// Negative dimensions, or too many elements, return an error instead of
// aborting.
inline absl::Status AllocateOutput(tensorflow::OpKernelContext* ctx, int index,
                                   std::initializer_list<int64_t> dims,
                                   tensorflow::Tensor** output) {
  tensorflow::TensorShape shape;
  TF_RETURN_IF_ERROR(tensorflow::TensorShape::BuildTensorShape(dims, &shape));
  return ctx->allocate_output(index, shape, output);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_ALLOCATE_OUTPUT_H_
