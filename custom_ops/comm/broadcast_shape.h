// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_BROADCAST_SHAPE_H_
#define TFDIST_CUSTOM_OPS_COMM_BROADCAST_SHAPE_H_

#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tfdist {

// The wire format of a shape, as the root of a broadcast sends it.
constexpr int kMaxDims = 15;
constexpr size_t kShapeBytes = (kMaxDims + 1) * sizeof(int64_t);

inline void PackShape(const tensorflow::TensorShape& shape, void* message) {
  int64_t dims[kMaxDims + 1] = {shape.dims()};
  for (int i = 0; i < shape.dims() && i < kMaxDims; ++i) {
    dims[i + 1] = shape.dim_size(i);
  }
  std::memcpy(message, dims, kShapeBytes);
}

inline absl::Status UnpackShape(const void* message,
                                tensorflow::TensorShape* shape) {
  int64_t dims[kMaxDims + 1];
  std::memcpy(dims, message, kShapeBytes);
  for (int i = 0; i < dims[0] && i < kMaxDims; ++i) {
    TF_RETURN_IF_ERROR(shape->AddDimWithStatus(dims[i + 1]));
  }
  return absl::OkStatus();
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_BROADCAST_SHAPE_H_
