// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_ORDER_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_ORDER_H_

#include <cstdint>
#include <vector>

namespace tfdist {

// True if every row is greater than the one before: sorted and unique.
bool StrictlyAscending(const int64_t* rows, int64_t size);

// Position of the first row outside [0, num_rows), or -1 if all are inside.
int64_t FirstRowOutside(const int64_t* rows, int64_t size, int64_t num_rows);

// Rows grouped by value. Group k is rows[k]; it came from the positions
// positions[starts[k]] to positions[starts[k + 1] - 1], in input order.
struct RowGroups {
  std::vector<int64_t> rows;       // unique, ascending
  std::vector<int64_t> starts;     // size rows + 1
  std::vector<int64_t> positions;  // permutation of the input positions
};

RowGroups GroupRows(const int64_t* rows, int64_t size);

// sums[k - begin] = sum of grads over the positions of group k, for k in
// [begin, end). Summed in input order, so the result is reproducible.
void SumGroups(const RowGroups& groups, const float* grads, int64_t dim,
               int64_t begin, int64_t end, float* sums);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_ORDER_H_
