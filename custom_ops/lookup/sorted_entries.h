// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_SORTED_ENTRIES_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_SORTED_ENTRIES_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "custom_ops/lookup/table_entries.h"

namespace tfdist {

// Memory that is reused in the next step, because new pages cost more time than
// the data written to them.
template <typename T>
class KeptArray {
 public:
  T* Resize(int64_t size) {
    // Also shrinks, so that one unusually large batch does not keep its memory.
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

// The entries of the rows in one range, which one thread sorts: ascending by
// row and, within a row, in the order of the samples. The format is the input
// format of RowGradSum.
class SortedEntries {
 public:
  // Builds from the entries with rows in [low, high). `all` is true if these
  // are all entries of the table.
  void Build(const TableEntries& entries, int64_t low, int64_t high, bool all);

  int64_t unique() const { return unique_; }
  const int64_t* rows() const { return rows_.data(); }
  const int64_t* row_splits() const { return row_splits_.data(); }
  const uint64_t* entries() const { return sorted_; }
  const float* weights() const { return weighted_ ? weights_.data() : nullptr; }

 private:
  int64_t Select(const TableEntries& entries) const;
  // Sorts in one pass, with one bin for each row in the range.
  void SortByBins(const TableEntries& entries, int64_t selected);
  // Sorts in several passes, over digits of the rows.
  void SortByDigits(const TableEntries& entries, int64_t selected);

  // Calls visit(entry, row - low, offset of its sample) for all entries of the
  // table, and for those in the range.
  template <typename Visit>
  void ForAll(const TableEntries& entries, const Visit& visit) const;
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

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_SORTED_ENTRIES_H_
