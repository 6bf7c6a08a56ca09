// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_VOCABULARY_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_VOCABULARY_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/vocabulary/hash_key.h"
#include "custom_ops/vocabulary/text_store.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/platform/mutex.h"

namespace tfdist {

// A dynamic vocabulary: the mapping of keys to rows of a table.
//
// A hash assigns each key to one of 2^k buckets. Each bucket has its own rows,
// limit and order of eviction, whichever rank owns it. The same keys therefore
// get the same rows with any number of ranks. Slot s of bucket b of B is row 1
// + s * B + b of the table. Row 0 is shared by keys without a row. When the
// capacity of a table grows, keys keep their rows.
//
// Rank r of W owns the buckets from n * B / W up to (n + 1) * B / W, where n is
// r - first_rank modulo W.
struct VocabularyOptions {
  enum class Evict { kNone, kLru, kLfu };

  std::string name;
  int64_t capacity = 0;
  int64_t buckets = 1;
  HashKey hash_key;
  uint32_t min_count = 1;
  Evict evict = Evict::kNone;
  int64_t steps_to_live = 0;  // 0: keys never expire
  bool full_shares = false;
  bool unadmitted_shares = false;
  int64_t rank = 0;
  int64_t world_size = 1;
  int64_t first_rank = 0;

  // Returns the row of keys that are not admitted.
  int32_t Unadmitted() const { return unadmitted_shares ? 0 : -1; }
};

// Keys whose rows are requested, and memory for the rows; -1 for no row.
struct KeyRequest {
  const void* keys = nullptr;
  // Occurrences of each key; nullptr: all once.
  const uint32_t* counts = nullptr;
  int64_t size = 0;
  int32_t* rows = nullptr;
};

// Totals since the start, and the current number of keys, on this rank.
struct VocabularyCounts {
  int64_t rows = 0;
  int64_t candidates = 0;
  int64_t admitted = 0;
  int64_t evicted = 0;
  int64_t expired = 0;
  int64_t step = 0;
};

// Keys with rows, or candidates, of the buckets that a rank owns: [buckets,
// slots]. A count of 0 marks a slot without a key.
struct KeyArrays {
  uint64_t* keys = nullptr;
  int64_t* counts = nullptr;
  int64_t* steps = nullptr;
};

class Vocabulary : public tensorflow::ResourceBase {
 public:
  explicit Vocabulary(const VocabularyOptions& options);

  const VocabularyOptions& options() const { return options_; }
  virtual int words() const = 0;
  int bits() const { return bits_; }
  HashKey hash_key() const { return {{hash_key_[0], hash_key_[1]}}; }
  int64_t buckets() const { return int64_t{1} << bits_; }
  // Returns the first bucket of this rank, of `buckets` in all, and the end of
  // its buckets.
  std::pair<int64_t, int64_t> OwnBuckets(int64_t buckets) const {
    const int64_t size = options_.world_size;
    const int64_t n = (options_.rank + size - options_.first_rank) % size;
    return {n * buckets / size, (n + 1) * buckets / size};
  }
  int64_t OwnerOf(int64_t bucket) const {
    const int64_t size = options_.world_size;
    const int64_t n = ((bucket + 1) * size - 1) >> bits_;
    const int64_t rank = options_.first_rank + n;
    return rank < size ? rank : rank - size;
  }
  // Rows of the first bucket, the maximum of all buckets; and the limit of
  // candidates of a bucket.
  int64_t slots() const { return Limit(0); }
  int64_t candidate_slots() const {
    return options_.min_count > 1 ? slots() : 0;
  }
  std::string DebugString() const override {
    return "vocabulary of table '" + options_.name + "'";
  }

  // Counts the keys of one step, from all ranks, and assigns rows to keys that
  // are admitted. The rows in `resets` have lost their keys. If a step asks
  // several times, only the first call sets `advance`.
  virtual absl::Status Learn(const std::vector<KeyRequest>& requests,
                             bool advance, std::vector<int32_t>* resets) = 0;
  // Returns the rows of keys, without any change.
  virtual absl::Status Find(const std::vector<KeyRequest>& requests) = 0;

  virtual VocabularyCounts Counts() = 0;
  virtual void Export(const KeyArrays& rows, const KeyArrays& candidates) = 0;
  // Replaces all keys by those in the given arrays. The arrays contain this
  // rank's buckets of a vocabulary with `buckets` buckets and the hash key
  // `hash_key`. `slots` and `candidate_slots` are their second dimensions.
  virtual absl::Status Import(int64_t buckets, const HashKey& hash_key,
                              int64_t step, const KeyArrays& rows,
                              int64_t slots, const KeyArrays& candidates,
                              int64_t candidate_slots) = 0;

  // Like Learn(), and also returns the resets of earlier steps that have
  // failed.
  absl::Status LearnStep(const std::vector<KeyRequest>& requests, bool advance,
                         std::vector<int32_t>* resets);
  // Discards the texts and the resets of failed steps.
  void Forget();

  // Stores the resets of a step from all ranks until an optimizer takes them:
  // the slots of these rows still have the values of other keys.
  void StoreResets(const std::vector<int32_t>& rows);
  std::vector<int32_t> TakeResets();

  // Texts of keys that this rank has requested or owns.
  TextStore& texts() { return texts_; }

 protected:
  int64_t Limit(int64_t bucket) const {
    return (options_.capacity - bucket + buckets() - 1) / buckets();
  }
  int32_t Row(int64_t bucket, int64_t slot) const {
    return static_cast<int32_t>(1 + slot * buckets() + bucket);
  }

  // Errors for keys that cannot get a row or cannot be read. `used` of all
  // `rows` rows of this rank have keys.
  absl::Status Full(int64_t bucket, int64_t used, int64_t rows) const;
  absl::Status WrongOwnerError() const;
  absl::Status CapacityError() const;
  absl::Status DamagedKeysError() const;

  const VocabularyOptions options_;
  std::atomic<int> bits_;
  std::atomic<uint64_t> hash_key_[2];

 private:
  tensorflow::mutex resets_mutex_;
  std::vector<int32_t> resets_;
  int64_t untaken_steps_ = 0;  // calls of StoreResets since the last TakeResets
  // Resets of LearnStep that StoreResets has not received yet.
  std::vector<int32_t> unreported_resets_;
  TextStore texts_;
};

// Returns a new vocabulary for keys of one word (int64) or two (fingerprints).
Vocabulary* NewVocabulary(const VocabularyOptions& options, int words);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_VOCABULARY_H_
