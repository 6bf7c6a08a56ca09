// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_TEXT_STORE_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_TEXT_STORE_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/tstring.h"

namespace tfdist {

// The texts of keys, by the key's row in the unpartitioned table. No memory is
// allocated before the first text is stored.
class TextStore {
 public:
  using Pair = std::pair<int32_t, std::string>;

  // Stores texts. Ignores rows that already have a text, and rows below 1,
  // which have no key.
  void Store(const int32_t* rows, const tensorflow::tstring* texts,
             int64_t size) {
    tensorflow::mutex_lock lock(mutex_);
    for (int64_t i = 0; i < size; ++i) {
      if (rows[i] < 1) continue;
      const auto [place, is_new] = of_row_.try_emplace(rows[i]);
      if (is_new) place->second = texts[i];
    }
  }

  // Replaces the texts of rows by a mark that another rank stores them.
  void Release(const int32_t* rows, int64_t size) {
    tensorflow::mutex_lock lock(mutex_);
    for (int64_t i = 0; i < size; ++i) of_row_[rows[i]] = std::string();
  }

  void Forget(const std::vector<int32_t>& rows) {
    tensorflow::mutex_lock lock(mutex_);
    if (of_row_.empty()) return;
    for (const int32_t row : rows) of_row_.erase(row);
  }

  void Clear() {
    tensorflow::mutex_lock lock(mutex_);
    of_row_.clear();
  }

  // Returns all texts that are stored here, sorted by row.
  std::vector<Pair> All() {
    std::vector<Pair> all;
    {
      tensorflow::mutex_lock lock(mutex_);
      for (const auto& each : of_row_) {
        if (!each.second.empty()) all.push_back(each);
      }
    }
    std::sort(all.begin(), all.end());
    return all;
  }

 private:
  tensorflow::mutex mutex_;
  std::unordered_map<int32_t, std::string> of_row_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_TEXT_STORE_H_
