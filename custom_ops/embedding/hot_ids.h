// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_EMBEDDING_HOT_IDS_H_
#define TFDIST_EMBEDDING_HOT_IDS_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "feature_grid.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// The hot ids of a feature are its most popular ones, the most popular first.
// Sender and receiver number the rows of a row part along a line: first its hot
// ids in the order of the list, then, from position `hot` on, all its rows in
// their own order. Popular ids are near the start of the line, close together,
// so that the gaps between them take few bits.

// For the sender: from ids to positions.
class HotIndex {
 public:
  static constexpr int64_t kMaxIds = 65536;

  // Refuses ids that repeat or are out of range.
  absl::Status Build(const int64_t* ids, int64_t count,
                     const FeatureGrid& grid);

  // The position of a hot id in its row part, `otherwise` for another id. Which
  // of the two is unpredictable, so no branch depends on it.
  uint64_t Find(uint64_t id, uint64_t otherwise) const {
    uint64_t slot = Slot(id);
    uint64_t found = slots_[slot];
    while (
        __builtin_expect((found != kEmpty) & (found >> kIndexBits != id), 0)) {
      slot = (slot + 1) & mask_;
      found = slots_[slot];
    }
    const uint64_t none = -static_cast<uint64_t>(found == kEmpty);
    return (none & otherwise) | (~none & found & kIndexMask);
  }

  // Hot ids of every row part.
  const std::vector<int64_t>& parts() const { return parts_; }
  uint16_t hash() const { return hash_; }

 private:
  static constexpr int kIndexBits = 16;
  static constexpr uint64_t kIndexMask = (1 << kIndexBits) - 1;
  static constexpr uint64_t kEmpty = ~uint64_t{0};

  uint64_t Slot(uint64_t id) const {
    return id * 0x9E3779B97F4A7C15ull >> shift_;
  }

  std::vector<uint64_t> slots_;  // id and position, or kEmpty
  uint64_t mask_ = 0;
  int shift_ = 0;
  std::vector<int64_t> parts_;
  uint16_t hash_ = 0;
};

// For the receiver: from positions to the local rows of its row part.
struct HotRows {
  absl::Status Build(const int64_t* ids, int64_t count, const FeatureGrid& grid,
                     int64_t part);

  std::vector<int64_t> rows;
  uint16_t hash = 0;
};

// Keeps what was built of the input "hot_ids", as long as the lists do not
// change. It holds on to the tensors: a buffer at the same address is then the
// same buffer.
template <typename T>
class HotCache {
 public:
  using Entries = std::vector<std::shared_ptr<const T>>;

  // One entry per feature, nullptr without a list. `build(ids, count, feature,
  // entry)` makes a new one.
  template <typename F>
  absl::Status Get(tensorflow::OpKernelContext* ctx, size_t features, F build,
                   Entries* entries) {
    tensorflow::OpInputList lists;
    TF_RETURN_IF_ERROR(ctx->input_list("hot_ids", &lists));
    entries->resize(features);
    if (lists.size() == 0) return absl::OkStatus();
    if (lists.size() != static_cast<int>(features)) {
      return absl::InvalidArgumentError(
          "hot_ids must have a list for every feature, or none at all");
    }
    std::lock_guard<std::mutex> lock(mutex_);
    tensors_.resize(features);
    entries_.resize(features);
    for (size_t f = 0; f < features; ++f) {
      const tensorflow::Tensor& list = lists[f];
      if (!Same(list, tensors_[f])) {
        std::shared_ptr<T> entry;
        if (list.NumElements() > 0) {
          entry = std::make_shared<T>();
          TF_RETURN_IF_ERROR(build(static_cast<const int64_t*>(list.data()),
                                   list.NumElements(), f, entry.get()));
        }
        entries_[f] = std::move(entry);
      }
      tensors_[f] = list;
    }
    *entries = entries_;
    return absl::OkStatus();
  }

 private:
  static bool Same(const tensorflow::Tensor& a, const tensorflow::Tensor& b) {
    if (a.NumElements() != b.NumElements()) return false;
    return a.data() == b.data() ||
           std::memcmp(a.data(), b.data(), a.NumElements() * 8) == 0;
  }

  std::mutex mutex_;
  std::vector<tensorflow::Tensor> tensors_;
  Entries entries_;
};

}  // namespace tfdist

#endif  // TFDIST_EMBEDDING_HOT_IDS_H_
