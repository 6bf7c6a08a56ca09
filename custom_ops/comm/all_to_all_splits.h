// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_ALL_TO_ALL_SPLITS_H_
#define TFDIST_CUSTOM_OPS_COMM_ALL_TO_ALL_SPLITS_H_

#include <string>

#include "custom_ops/common/message.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfdist {

// Returns what is wrong with the send splits of an all_to_all, or "". Reads the
// values of `splits` and the shape of `input`.
inline std::string CheckSplits(const tensorflow::Tensor& input,
                               const tensorflow::Tensor& splits,
                               int world_size) {
  if (input.dims() < 1) return "input must have at least one dimension";
  if (splits.dims() != 1 || splits.dim_size(0) != world_size) {
    return Message("send_splits must have shape [", world_size, "], received ",
                   splits.shape().DebugString());
  }
  int64_t left = input.dim_size(0);
  for (int peer = 0; peer < world_size; ++peer) {
    const int64_t rows = splits.vec<int64_t>()(peer);
    if (rows < 0 || rows > left) {
      return Message("send_splits[", peer, "] is ", rows, " where ", left,
                     " of ", input.dim_size(0), " rows are left");
    }
    left -= rows;
  }
  if (left == 0) return "";
  return Message("send_splits sum to ", input.dim_size(0) - left,
                 ", the input has ", input.dim_size(0), " rows");
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_ALL_TO_ALL_SPLITS_H_
