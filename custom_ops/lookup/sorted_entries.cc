// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/lookup/sorted_entries.h"

#include <algorithm>
#include <cstring>

#include "custom_ops/common/radix_sort.h"

namespace tfdist {

void SortedEntries::Build(const TableEntries& entries, int64_t low,
                          int64_t high, bool all) {
  low_ = low;
  range_ = high - low;
  all_ = all;
  weighted_ = entries.weights != nullptr;
  const int64_t selected = all ? entries.count : Select(entries);
  rows_.Resize(selected + 1);
  row_splits_.Resize(selected + 2);
  if (weighted_) weights_.Resize(selected);
  // The bins must fit into the second-level cache, and must not greatly
  // outnumber the entries.
  constexpr uint64_t kMostBins = uint64_t{1} << 17;
  if (range_ <= std::min(kMostBins, 2 * static_cast<uint64_t>(selected))) {
    SortByBins(entries, selected);
  } else {
    SortByDigits(entries, selected);
  }
}

int64_t SortedEntries::Select(const TableEntries& entries) const {
  int64_t selected = 0;
  for (const LookupBlock& block : entries.blocks) {
    const int64_t* rows = entries.rows + entries.First(block);
    const int64_t count = entries.Count(block);
    for (int64_t i = 0; i < count; ++i) selected += rows[i] - low_ < range_;
  }
  return selected;
}

template <typename Visit>
void SortedEntries::ForAll(const TableEntries& entries,
                           const Visit& visit) const {
  for (const LookupBlock& block : entries.blocks) {
    uint64_t offset = block.first_value;
    for (int64_t s = 0; s < block.samples; ++s, offset += block.width) {
      const int64_t* splits = entries.row_splits + block.first_sample + s;
      for (int64_t i = splits[0]; i < splits[1]; ++i) {
        visit(i, entries.rows[i] - low_, offset);
      }
    }
  }
}

template <typename Visit>
void SortedEntries::ForEach(const TableEntries& entries,
                            const Visit& visit) const {
  ForAll(entries, [&](int64_t i, uint64_t row, uint64_t offset) {
    if (all_ || row < range_) visit(i, row, offset);
  });
}

void SortedEntries::SortByBins(const TableEntries& entries, int64_t selected) {
  CountingSort sort(bins_.Resize(range_), range_);
  for (const LookupBlock& block : entries.blocks) {
    const int64_t* rows = entries.rows + entries.First(block);
    const int64_t count = entries.Count(block);
    if (all_) {
      for (int64_t i = 0; i < count; ++i) sort.Count(rows[i] - low_);
    } else {
      for (int64_t i = 0; i < count; ++i) {
        if (rows[i] - low_ < range_) sort.Count(rows[i] - low_);
      }
    }
  }
  // Writes for each bin, but advances only after bins with entries. Which bins
  // have entries is unpredictable, so a branch would take more time than a
  // store.
  int64_t* rows = rows_.data();
  int64_t* splits = row_splits_.data();
  int64_t row = 0;
  const uint32_t end =
      sort.Start([&](size_t bin, uint32_t first, uint32_t size) {
        rows[row] = low_ + bin;
        splits[row] = first;
        row += size > 0;
      });
  splits[row] = end;
  unique_ = row;
  uint64_t* sorted = keys_.Resize(selected);
  float* weights = weights_.data();
  if (weighted_) {
    ForEach(entries, [&](int64_t i, uint64_t key, uint64_t offset) {
      const uint32_t to = sort.Place(key);
      sorted[to] = offset << 1;
      weights[to] = entries.weights[i];
    });
  } else {
    ForEach(entries, [&](int64_t, uint64_t key, uint64_t offset) {
      sorted[sort.Place(key)] = offset << 1;
    });
  }
  for (int64_t r = 0; r < row; ++r) sorted[splits[r]] |= 1;
  sorted_ = sorted;
}

// A key consists of the row in the high bits and the offset in the low bits.
// The sort uses only the row and is stable, so entries of a row remain in the
// order of the samples.
void SortedEntries::SortByDigits(const TableEntries& entries,
                                 int64_t selected) {
  const int bits = entries.offset_bits;
  SortBuffers sort = {keys_.Resize(selected + 1), spare_keys_.Resize(selected)};
  if (weighted_) {
    sort.values = weight_bits_.Resize(2 * selected + 1);
    sort.spare_values = sort.values + selected + 1;
  }
  int64_t size = 0;
  bool ascending = true;
  uint64_t last = 0;
  const auto take = [&](int64_t i, uint64_t row, uint64_t offset, bool inside) {
    if (weighted_) {
      std::memcpy(sort.values + size, entries.weights + i, sizeof(float));
    }
    ascending &= row >= last || !inside;
    last = inside ? row : last;
    sort.keys[size] = row << bits | offset;
    size += inside;
  };
  if (all_) {
    ForAll(entries, [&](int64_t i, uint64_t row, uint64_t offset) {
      take(i, row, offset, true);
    });
  } else {
    // Which entries are in the range is unpredictable, so each is written, as
    // in SortByBins.
    ForAll(entries, [&](int64_t i, uint64_t row, uint64_t offset) {
      take(i, row, offset, row < range_);
    });
  }
  if (!ascending) RadixSort(size, bits, bits + BitWidth(range_ - 1), &sort);
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  int64_t* rows = rows_.data();
  int64_t* splits = row_splits_.data();
  uint64_t* sorted = sort.spare_keys;
  uint64_t before = ~uint64_t{0};  // not a row, because rows have fewer bits
  int64_t row = -1;
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t key = sort.keys[i];
    const bool first = key >> bits != before;
    before = key >> bits;
    row += first;
    // Written for each entry, without a branch, as in SortByBins.
    rows[row] = low_ + before;
    splits[row + 1] = i + 1;
    sorted[i] = (key & mask) << 1 | static_cast<uint64_t>(first);
  }
  splits[0] = 0;
  unique_ = row + 1;
  sorted_ = sorted;
  if (weighted_) {
    std::memcpy(weights_.data(), sort.values, size * sizeof(float));
  }
}

}  // namespace tfdist
