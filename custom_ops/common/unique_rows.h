// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_UNIQUE_ROWS_H_
#define TFDIST_CUSTOM_OPS_COMMON_UNIQUE_ROWS_H_

#include <cstdint>
#include <limits>
#include <memory>

namespace tfdist {

// The unique values of rows, or ids, in ascending order, with the positions of
// each.
class UniqueRows {
 public:
  // The limit of rows, because positions are 32-bit numbers.
  static constexpr int64_t kMostRows = std::numeric_limits<uint32_t>::max();

  // `rows`: any numbers, at most kMostRows. If `indices` is not nullptr,
  // indices[count] is set to the index of the unique row of each row.
  UniqueRows(const int64_t* rows, int64_t count, int64_t* indices = nullptr);

  // The number of unique rows.
  int64_t size() const { return size_; }
  const int64_t* rows() const { return rows_; }

  // Unique row k occurs at positions(k)[0] .. positions(k + 1)[-1], ascending.
  const uint32_t* positions(int64_t k) const { return positions_ + starts_[k]; }

 private:
  int64_t size_ = 0;
  std::unique_ptr<uint64_t[]> key_memory_;
  std::unique_ptr<uint32_t[]> position_memory_;
  const int64_t* rows_ = nullptr;
  const uint32_t* positions_ = nullptr;
  const uint32_t* starts_ = nullptr;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_UNIQUE_ROWS_H_
