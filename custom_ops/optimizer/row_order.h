// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_ORDER_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_ORDER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "custom_ops/common/unique_rows.h"

namespace tfdist {

// Whether every row is greater than the one before: sorted and unique.
bool StrictlyAscending(const int64_t* rows, int64_t size);

// Returns an error that names the first row outside [0, num_rows) of `table`.
absl::Status CheckRowsInside(const std::string& op, const int64_t* rows,
                             int64_t size, int64_t num_rows,
                             const std::string& table);

// Returns an error if a row occurs twice.
absl::Status CheckEachOnce(const std::string& op, const int64_t* rows,
                           int64_t size);

// Returns an error if there are more rows than UniqueRows supports. Strictly
// ascending rows have no such limit, because they are not sorted.
absl::Status CheckSortable(const std::string& op, int64_t size);

// Computes sums[k - begin], the sum of grads over the positions of unique row
// k, for k in [begin, end). The sums are in input order, so the result is
// reproducible.
void SumRepeated(const UniqueRows& unique, const float* grads, int64_t dim,
                 int64_t begin, int64_t end, float* sums);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_ORDER_H_
