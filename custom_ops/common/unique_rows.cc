// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/common/unique_rows.h"

#include <algorithm>

#include "custom_ops/common/radix_sort.h"

namespace tfdist {

UniqueRows::UniqueRows(const int64_t* rows, int64_t count, int64_t* indices)
    : key_memory_(new uint64_t[2 * count]),
      position_memory_(new uint32_t[2 * count + 2]) {
  SortBuffers sort = {key_memory_.get(), key_memory_.get() + count,
                      position_memory_.get(),
                      position_memory_.get() + count + 1};
  uint64_t first = 0;
  if (count > 0) {
    int64_t smallest = rows[0];
    int64_t largest = rows[0];
    for (int64_t i = 1; i < count; ++i) {
      smallest = std::min(smallest, rows[i]);
      largest = std::max(largest, rows[i]);
    }
    first = static_cast<uint64_t>(smallest);
    for (int64_t i = 0; i < count; ++i) {
      sort.keys[i] = static_cast<uint64_t>(rows[i]) - first;
      sort.values[i] = static_cast<uint32_t>(i);
    }
    RadixSort(count, 0, BitWidth(static_cast<uint64_t>(largest) - first),
              &sort);
  }
  // The unique rows overwrite keys that have been read. Which rows are
  // duplicates is unpredictable, so every row is written, without a branch. A
  // duplicate rewrites the elements of its row.
  uint32_t* starts = sort.spare_values;
  starts[0] = 0;
  int64_t last = -1;
  uint64_t before = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t key = sort.keys[i];
    last += i == 0 || key != before;
    before = key;
    sort.keys[last] = key + first;
    starts[last + 1] = static_cast<uint32_t>(i + 1);
    if (indices != nullptr) indices[sort.values[i]] = last;
  }
  size_ = last + 1;
  rows_ = reinterpret_cast<const int64_t*>(sort.keys);
  positions_ = sort.values;
  starts_ = starts;
}

}  // namespace tfdist
