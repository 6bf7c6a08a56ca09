// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_ALL_REDUCE_INPUTS_H_
#define TFDIST_CUSTOM_OPS_COMM_ALL_REDUCE_INPUTS_H_

#include <cmath>
#include <string>

#include "custom_ops/comm/all_reduce.h"
#include "custom_ops/comm/collective_op.h"

namespace tfdist {

// Adds the size, dtype and shapes of the tensors to sum, which the ranks must
// agree on. These tensors are all inputs of the op except the last. The last
// `unweighted` of them are summed without weights.
inline void DescribeInputs(tensorflow::OpKernelContext* ctx, int unweighted,
                           AllReduce::Options& options) {
  const int count = ctx->num_inputs() - 1;
  for (int i = 0; i < count; ++i) {
    const tensorflow::Tensor& input = ctx->input(i);
    options.count += input.NumElements();
    if (i >= count - unweighted) options.unweighted += input.NumElements();
    options.shape_hash = HashShape(input.shape(), 0, options.shape_hash);
    if (options.shapes.size() < sizeof(Header::shapes)) {
      options.shapes += (i > 0 ? " " : "") + input.shape().DebugString();
    }
  }
  if (unweighted > 0) {
    options.shape_hash =
        HashShape(tensorflow::TensorShape({unweighted}), 0, options.shape_hash);
  }
  options.dtype = ctx->input(0).dtype();
  options.element_bytes = tensorflow::DataTypeSize(ctx->input(0).dtype());
}

// Reads this rank's weight into `options`. Returns the error of an invalid
// weight, or "".
inline std::string ReadWeight(const tensorflow::Tensor& weight,
                              AllReduce::Options& options) {
  if (weight.NumElements() != 1) {
    return Message("weight must be a scalar, received shape ",
                   weight.shape().DebugString());
  }
  options.weight = weight.flat<float>()(0);
  if (std::isfinite(options.weight) && options.weight >= 0) return "";
  return Message("weight must be finite and not negative, received ",
                 options.weight);
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_ALL_REDUCE_INPUTS_H_
