// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/vocabulary/vocabulary.h"

#include <algorithm>

#include "custom_ops/common/message.h"
#include "custom_ops/common/radix_sort.h"
#include "custom_ops/vocabulary/bucket_keys.h"
#include "tensorflow/core/platform/logging.h"

namespace tfdist {

// How many steps an optimizer may skip a table, for example while it
// accumulates gradients, before there is a warning.
constexpr int64_t kMostLeft = 1000;

Vocabulary::Vocabulary(const VocabularyOptions& options)
    : options_(options),
      bits_(BitWidth(options.buckets) - 1),
      hash_key_{options.hash_key.words[0], options.hash_key.words[1]} {}

absl::Status Vocabulary::LearnStep(const std::vector<KeyRequest>& requests,
                                   bool advance, std::vector<int32_t>* resets) {
  const absl::Status status = Learn(requests, advance, resets);
  tensorflow::mutex_lock lock(resets_mutex_);
  resets->insert(resets->end(), unread_.begin(), unread_.end());
  unread_ = *resets;
  return status;
}

void Vocabulary::Forget() {
  texts_.Clear();
  tensorflow::mutex_lock lock(resets_mutex_);
  unread_.clear();
}

void Vocabulary::LeaveResets(const std::vector<int32_t>& rows) {
  if (rows.empty()) return;
  texts_.Forget(rows);
  tensorflow::mutex_lock lock(resets_mutex_);
  unread_.clear();
  resets_.insert(resets_.end(), rows.begin(), rows.end());
  if (++left_ == kMostLeft) {
    LOG(WARNING) << "Table '" << options_.name << "' has given rows to other "
                 << "keys in " << kMostLeft << " steps, and no optimizer has "
                 << "reset its slots of them: use one of "
                 << "tfdist_ext.optimizers.";
  }
  if (static_cast<int64_t>(resets_.size()) > 2 * options_.capacity) {
    std::sort(resets_.begin(), resets_.end());
    resets_.erase(std::unique(resets_.begin(), resets_.end()), resets_.end());
  }
}

std::vector<int32_t> Vocabulary::TakeResets() {
  tensorflow::mutex_lock lock(resets_mutex_);
  left_ = 0;
  std::vector<int32_t> taken;
  taken.swap(resets_);
  return taken;
}

absl::Status Vocabulary::Full(int64_t bucket, int64_t used,
                              int64_t rows) const {
  const bool evicts = options_.evict != VocabularyOptions::Evict::kNone;
  return absl::FailedPreconditionError(Message(
      "Table '", options_.name, "': no row is left for a new key. Bucket ",
      bucket, " of ", buckets(), " is full: all of its ", Limit(bucket),
      " rows, of a capacity of ", options_.capacity, ", have keys",
      evicts ? " of this batch. " : ", and none is evicted. ", "In all, rank ",
      options_.rank, " of ", options_.world_size, " has keys in ", used,
      " of its ", rows, " rows (", 100 * used / rows, " %). ",
      "Give DynamicVocabulary a larger capacity (a checkpoint is restored "
      "into it), evict='lru' or 'lfu', or full='shared_row'."));
}

absl::Status Vocabulary::Misdirected() const {
  return absl::DataLossError(Message(
      "Table '", options_.name, "': a rank asked rank ", options_.rank,
      " for a key that another one owns. All ranks must restore the same "
      "checkpoint."));
}

absl::Status Vocabulary::DoesNotFit() const {
  return absl::InvalidArgumentError(Message(
      "Table '", options_.name, "' has a capacity of ", options_.capacity,
      ", less than that of the checkpoint, which has keys beyond it. Give "
      "DynamicVocabulary at least the capacity that was saved."));
}

absl::Status Vocabulary::Damaged() const {
  return absl::DataLossError(Message(
      "The keys that were saved for table '", options_.name,
      "' are damaged: one is in a bucket that it is not of, or twice."));
}

Vocabulary* NewVocabulary(const VocabularyOptions& options, int words) {
  if (words == 1) return new BucketKeys<1>(options);
  return new BucketKeys<2>(options);
}

}  // namespace tfdist
