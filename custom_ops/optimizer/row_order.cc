// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/optimizer/row_order.h"

#include <algorithm>
#include <numeric>

namespace tfdist {
namespace {

// Borders of the ascending runs of rows: run k is [borders[k],
// borders[k + 1]).
std::vector<int64_t> RunBorders(const int64_t* rows, int64_t size) {
  std::vector<int64_t> borders = {0};
  for (int64_t i = 1; i < size; ++i) {
    if (rows[i] < rows[i - 1]) borders.push_back(i);
  }
  borders.push_back(size);
  return borders;
}

// Positions in the order of their rows, equal rows in input order. A natural
// merge sort: a layer called k times hands over k ascending runs, which cost
// log2(k) passes instead of log2(size).
std::vector<int64_t> SortedPositions(const int64_t* rows, int64_t size) {
  std::vector<int64_t> positions(size);
  std::iota(positions.begin(), positions.end(), 0);
  std::vector<int64_t> merged(size);
  std::vector<int64_t> borders = RunBorders(rows, size);
  const auto before = [rows](int64_t a, int64_t b) {
    return rows[a] < rows[b];
  };
  while (borders.size() > 2) {
    std::vector<int64_t> next = {0};
    for (size_t run = 0; run + 1 < borders.size(); run += 2) {
      const int64_t begin = borders[run];
      const int64_t middle = borders[run + 1];
      const int64_t end = run + 2 < borders.size() ? borders[run + 2] : middle;
      std::merge(positions.begin() + begin, positions.begin() + middle,
                 positions.begin() + middle, positions.begin() + end,
                 merged.begin() + begin, before);
      next.push_back(end);
    }
    positions.swap(merged);
    borders.swap(next);
  }
  return positions;
}

}  // namespace

bool StrictlyAscending(const int64_t* rows, int64_t size) {
  for (int64_t i = 1; i < size; ++i) {
    if (rows[i] <= rows[i - 1]) return false;
  }
  return true;
}

int64_t FirstRowOutside(const int64_t* rows, int64_t size, int64_t num_rows) {
  for (int64_t i = 0; i < size; ++i) {
    if (rows[i] < 0 || rows[i] >= num_rows) return i;
  }
  return -1;
}

RowGroups GroupRows(const int64_t* rows, int64_t size) {
  RowGroups groups;
  groups.positions = SortedPositions(rows, size);
  for (int64_t i = 0; i < size; ++i) {
    const int64_t row = rows[groups.positions[i]];
    if (groups.rows.empty() || groups.rows.back() != row) {
      groups.rows.push_back(row);
      groups.starts.push_back(i);
    }
  }
  groups.starts.push_back(size);
  return groups;
}

void SumGroups(const RowGroups& groups, const float* grads, int64_t dim,
               int64_t begin, int64_t end, float* sums) {
  for (int64_t group = begin; group < end; ++group) {
    float* __restrict__ sum = sums + (group - begin) * dim;
    const int64_t first = groups.starts[group];
    std::copy_n(grads + groups.positions[first] * dim, dim, sum);
    for (int64_t i = first + 1; i < groups.starts[group + 1]; ++i) {
      const float* __restrict__ grad = grads + groups.positions[i] * dim;
      for (int64_t j = 0; j < dim; ++j) sum[j] += grad[j];
    }
  }
}

}  // namespace tfdist
