// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_GRAD_FUNCTOR_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_GRAD_FUNCTOR_H_

#include <cstdint>

namespace tfdist {

// The gradient of the pooled lookup, with entries sorted by row. The gradient
// of row r is
//
//   out[r] = sum of weights[i] * (the `width` numbers from grad + offset of i),
//       i in [row_splits[r], row_splits[r + 1])
//
// An entry is twice its offset, plus one if it is the first entry of its row.
// The sums can thus run over the entries without a branch at the end of each
// row.
struct RowGradSum {
  const float* grad;
  int64_t width;
  const int64_t* row_splits;  // [rows + 1]; every row has entries
  const uint64_t* entries;
  const float* weights;  // of each entry, or nullptr if all are 1
  float* out;            // [rows, width]
};

// Computes rows [begin, end) on the calling thread.
void RowGradSumCpu(const RowGradSum& args, int64_t begin, int64_t end);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_GRAD_FUNCTOR_H_
