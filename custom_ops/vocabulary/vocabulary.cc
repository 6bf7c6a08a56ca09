// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/vocabulary/vocabulary.h"

#include <algorithm>

#include "custom_ops/common/message.h"
#include "custom_ops/common/radix_sort.h"
#include "custom_ops/vocabulary/bucket_keys.h"
#include "tensorflow/core/platform/logging.h"

namespace tfdist {

// Number of steps that an optimizer may skip a table, for example while it
// accumulates gradients, before a warning is logged.
constexpr int64_t kMaxUntakenSteps = 1000;

Vocabulary::Vocabulary(const VocabularyOptions& options)
    : options_(options),
      bits_(BitWidth(options.buckets) - 1),
      hash_key_{options.hash_key.words[0], options.hash_key.words[1]} {}

absl::Status Vocabulary::LearnStep(const std::vector<KeyRequest>& requests,
                                   bool advance, std::vector<int32_t>* resets) {
  const absl::Status status = Learn(requests, advance, resets);
  tensorflow::mutex_lock lock(resets_mutex_);
  resets->insert(resets->end(), unreported_resets_.begin(),
                 unreported_resets_.end());
  unreported_resets_ = *resets;
  return status;
}

void Vocabulary::Forget() {
  texts_.Clear();
  tensorflow::mutex_lock lock(resets_mutex_);
  unreported_resets_.clear();
}

void Vocabulary::StoreResets(const std::vector<int32_t>& rows) {
  if (rows.empty()) return;
  texts_.Forget(rows);
  tensorflow::mutex_lock lock(resets_mutex_);
  unreported_resets_.clear();
  resets_.insert(resets_.end(), rows.begin(), rows.end());
  if (++untaken_steps_ == kMaxUntakenSteps) {
    LOG(WARNING) << "Table '" << options_.name << "': rows were assigned to "
                 << "new keys in " << kMaxUntakenSteps
                 << " steps, but no optimizer has reset its slots for these "
                 << "rows. Use one of tfdist_ext.optimizers.";
  }
  if (static_cast<int64_t>(resets_.size()) > 2 * options_.capacity) {
    std::sort(resets_.begin(), resets_.end());
    resets_.erase(std::unique(resets_.begin(), resets_.end()), resets_.end());
  }
}

std::vector<int32_t> Vocabulary::TakeResets() {
  tensorflow::mutex_lock lock(resets_mutex_);
  untaken_steps_ = 0;
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
      " rows are assigned to keys",
      evicts ? " of this batch" : ", and eviction is disabled",
      ". The table has a capacity of ", options_.capacity, ". Rank ",
      options_.rank, " of ", options_.world_size, " uses ", used, " of its ",
      rows, " rows (", 100 * used / rows, " %). ",
      "Set a larger capacity in DynamicVocabulary (checkpoints can be restored "
      "into it), or set evict='lru', evict='lfu' or full='shared_row'."));
}

absl::Status Vocabulary::WrongOwnerError() const {
  return absl::DataLossError(Message(
      "Table '", options_.name, "': rank ", options_.rank,
      " received a request for a key that another rank owns. Restore the same "
      "checkpoint on all ranks."));
}

absl::Status Vocabulary::CapacityError() const {
  return absl::InvalidArgumentError(Message(
      "Table '", options_.name, "': its capacity of ", options_.capacity,
      " is smaller than that of the checkpoint, and the checkpoint has keys in "
      "rows beyond it. Set at least the saved capacity in "
      "DynamicVocabulary."));
}

absl::Status Vocabulary::DamagedKeysError() const {
  return absl::DataLossError(
      Message("Table '", options_.name,
              "': its keys in the checkpoint are damaged: a "
              "key is in the wrong bucket, or occurs twice. Restore another "
              "checkpoint."));
}

Vocabulary* NewVocabulary(const VocabularyOptions& options, int words) {
  if (words == 1) return new BucketKeys<1>(options);
  return new BucketKeys<2>(options);
}

}  // namespace tfdist
