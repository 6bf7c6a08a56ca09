// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_SUM_FUNCTOR_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_SUM_FUNCTOR_H_

#include <cstddef>

#include "tensorflow/core/framework/types.pb.h"

namespace tfdist {

// out[i] = scale * sum over k of weights[k] * inputs[k][i], k ascending, for
// `count` elements. A null `weights` means all 1 and no scale; an input of
// weight 0 is not read at all, so its NaNs do not count. `out` may be one of
// the inputs. 16-bit floats are summed in float and rounded once.
using SumFunction = void (*)(void* out, const void* const* inputs,
                             const float* weights, int input_count, float scale,
                             size_t count);

// Null for a dtype that has no sum.
SumFunction FindSum(tensorflow::DataType dtype);

// Sums that travel half made, from rank to rank: 16-bit floats in float.
struct PartialSum {
  size_t bytes;     // of a number on its way
  SumFunction sum;  // of partial sums
  // sums[i] = before[i] + weight * input[i]. A null `before` is left out; so is
  // a null weight, and an input of weight 0.
  void (*add)(void* sums, const void* before, const void* input,
              const float* weight, size_t count);
  // out[i] = scale * sums[i], rounded; a null scale is left out.
  void (*finish)(void* out, const void* sums, const float* scale, size_t count);
};

// Of a dtype that has a sum.
PartialSum FindPartialSum(tensorflow::DataType dtype);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_SUM_FUNCTOR_H_
