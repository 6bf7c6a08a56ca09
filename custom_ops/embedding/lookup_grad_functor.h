// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_GRAD_FUNCTOR_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_GRAD_FUNCTOR_H_

#include <cstdint>

namespace tfdist {

// The gradient of the pooled lookup, entries in order of their rows: row r gets
//
//   out[r] = sum of weights[i] * (the `width` numbers from grad + offset of i),
//       i in [row_splits[r], row_splits[r + 1])
//
// An entry is its offset, times two, plus one if it is the first of its row: so
// the sums run over the entries without a branch on where a row ends.
struct RowGradSum {
  const float* grad;
  int64_t width;
  const int64_t* row_splits;  // [rows + 1]; every row has entries
  const uint64_t* entries;
  const float* weights;  // of every entry, or nullptr when all are 1
  float* out;            // [rows, width]
};

// Computes rows [begin, end) on the calling thread.
void RowGradSumCpu(const RowGradSum& args, int64_t begin, int64_t end);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_LOOKUP_GRAD_FUNCTOR_H_
