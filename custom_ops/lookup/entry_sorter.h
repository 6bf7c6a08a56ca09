// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_ENTRY_SORTER_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_ENTRY_SORTER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "custom_ops/lookup/sorted_entries.h"
#include "custom_ops/lookup/table_entries.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// The sorted entries of the rows [low, high) of a table.
struct SortedRange {
  size_t table;
  int64_t low;
  int64_t high;
  const SortedEntries* entries;
};

// Sorts the entries of LookupGrad's inputs by row, for a kernel.
class EntrySorter {
 public:
  // The ranges of tables [first, end), ordered by table and row.
  using Use = std::function<absl::Status(
      size_t first, size_t end, const std::vector<SortedRange>& ranges)>;

  // Sorts a few tables at a time and calls `use` for them, so that the sorted
  // entries are still in the cache. Returns an error before the first call if a
  // row is not in its table. Several calls may run at the same time.
  absl::Status Run(tensorflow::OpKernelContext* ctx,
                   const std::vector<TableEntries>& tables, const Use& use);

 private:
  // The temporary memory of a call, which the next call reuses.
  using Scratch = std::vector<std::unique_ptr<SortedEntries>>;

  static absl::Status Sort(tensorflow::OpKernelContext* ctx,
                           const std::vector<TableEntries>& tables,
                           const std::vector<int64_t>& limits, size_t first,
                           size_t end, const Use& use, Scratch* scratch);

  std::mutex mutex_;
  Scratch scratch_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_ENTRY_SORTER_H_
