// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_SORTED_ENTRIES_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_SORTED_ENTRIES_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "custom_ops/embedding/table_entries.h"

namespace tfdist {

// Memory that is kept for the next step: fresh pages cost more than what is
// written to them.
template <typename T>
class KeptArray {
 public:
  T* Resize(int64_t size) {
    // One batch of an unusual size does not stay for ever.
    if (size > capacity_ || size < capacity_ / 16) {
      capacity_ = size + size / 4;
      data_.reset(new T[capacity_]);
    }
    return data_.get();
  }
  T* data() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
  int64_t capacity_ = 0;
};

// The entries of the rows in one range, ascending by row, within a row in the
// order of the samples: what one thread sorts. The form is that of RowGradSum.
class SortedEntries {
 public:
  // Takes the entries with rows in [low, high); `all` if those are all of the
  // table's.
  void Build(const TableEntries& entries, int64_t low, int64_t high, bool all);

  int64_t unique() const { return unique_; }
  const int64_t* rows() const { return rows_.data(); }
  const int64_t* row_splits() const { return row_splits_.data(); }
  const uint64_t* entries() const { return sorted_; }
  const float* weights() const { return weighted_ ? weights_.data() : nullptr; }

 private:
  int64_t Select(const TableEntries& entries) const;
  // One pass over as many bins as there are rows in the range.
  void SortByBins(const TableEntries& entries, int64_t selected);
  // Passes over digits of the rows.
  void SortByDigits(const TableEntries& entries, int64_t selected);

  // Calls visit(entry, row - low, offset of its sample) for the range's
  // entries.
  template <typename Visit>
  void ForEach(const TableEntries& entries, const Visit& visit) const;

  uint64_t low_ = 0;
  uint64_t range_ = 0;
  bool all_ = false;
  bool weighted_ = false;
  int64_t unique_ = 0;
  const uint64_t* sorted_ = nullptr;
  KeptArray<int64_t> rows_;
  KeptArray<int64_t> row_splits_;
  KeptArray<float> weights_;
  KeptArray<uint64_t> keys_;
  KeptArray<uint64_t> spare_keys_;
  KeptArray<uint32_t> weight_bits_;
  KeptArray<uint32_t> bins_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_SORTED_ENTRIES_H_
