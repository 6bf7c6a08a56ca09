// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_SUM_FUNCTOR_H_
#define TFDIST_CUSTOM_OPS_COMM_SUM_FUNCTOR_H_

#include <cstddef>

#include "tensorflow/core/framework/types.pb.h"

namespace tfdist {

// Computes out[i] = scale * sum over k of weights[k] * inputs[k][i], with
// ascending k, for `count` elements. A null `weights` means weights of 1 and no
// scale. An input of weight 0 is not read, so its NaNs have no effect. `out`
// may be one of the inputs. 16-bit floats are summed in float and rounded once.
using SumFunction = void (*)(void* out, const void* const* inputs,
                             const float* weights, int input_count, float scale,
                             size_t count);

// Returns null for a dtype that has no sum.
SumFunction FindSum(tensorflow::DataType dtype);

// Partial sums, which are sent from rank to rank: 16-bit floats are sent as
// float.
struct PartialSum {
  size_t bytes;     // of an element of a partial sum
  SumFunction sum;  // sums partial sums
  // Computes sums[i] = before[i] + weight * input[i]. A null `before`, a null
  // weight, and an input of weight 0 are left out.
  void (*add)(void* sums, const void* before, const void* input,
              const float* weight, size_t count);
  // Computes out[i] = scale * sums[i], rounded. A null scale is left out.
  void (*finish)(void* out, const void* sums, const float* scale, size_t count);
};

// Requires a dtype that has a sum.
PartialSum FindPartialSum(tensorflow::DataType dtype);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_SUM_FUNCTOR_H_
