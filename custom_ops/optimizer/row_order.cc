// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/optimizer/row_order.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {

bool StrictlyAscending(const int64_t* rows, int64_t size) {
  for (int64_t i = 1; i < size; ++i) {
    if (rows[i] <= rows[i - 1]) return false;
  }
  return true;
}

absl::Status CheckRowsInside(const std::string& op, const int64_t* rows,
                             int64_t size, int64_t num_rows,
                             const std::string& table) {
  for (int64_t i = 0; i < size; ++i) {
    if (rows[i] >= 0 && rows[i] < num_rows) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": row ", rows[i], " at position ", i,
                     " is outside the ", num_rows, " rows of ", table));
  }
  return absl::OkStatus();
}

absl::Status CheckEachOnce(const std::string& op, const int64_t* rows,
                           int64_t size) {
  if (StrictlyAscending(rows, size)) return absl::OkStatus();
  TF_RETURN_IF_ERROR(CheckSortable(op, size));
  const UniqueRows unique(rows, size);
  if (unique.size() == size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(op, ": ", size, " rows must each be given once; received ",
                   unique.size(), " different ones"));
}

absl::Status CheckSortable(const std::string& op, int64_t size) {
  if (size <= UniqueRows::kMostRows) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      op, ": at most ", UniqueRows::kMostRows,
      " rows can be put in order; received ", size,
      ". Pass more of them strictly ascending, or in several calls"));
}

void SumRepeated(const UniqueRows& unique, const float* grads, int64_t dim,
                 int64_t begin, int64_t end, float* sums) {
  for (int64_t k = begin; k < end; ++k) {
    float* __restrict__ sum = sums + (k - begin) * dim;
    const uint32_t* position = unique.positions(k);
    const uint32_t* last = unique.positions(k + 1);
    std::copy_n(grads + *position * dim, dim, sum);
    while (++position < last) {
      const float* __restrict__ grad = grads + *position * dim;
      for (int64_t j = 0; j < dim; ++j) sum[j] += grad[j];
    }
  }
}

}  // namespace tfdist
