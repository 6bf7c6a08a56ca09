// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_BUCKET_KEYS_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_BUCKET_KEYS_H_

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "custom_ops/vocabulary/free_slots.h"
#include "custom_ops/vocabulary/hash_keys.h"
#include "custom_ops/vocabulary/key_table.h"
#include "custom_ops/vocabulary/vocabulary.h"

namespace tfdist {

// The keys of the buckets that this rank owns.
//
// A step is processed in two passes. The first pass finds the keys that have
// rows and counts them; the order of the ranks does not matter here. The second
// pass sorts all other keys by bucket and key, and processes one bucket after
// another. Which keys are admitted, and which are evicted for them, therefore
// depends only on the keys of the step.
template <int kWords>
class BucketKeys : public Vocabulary {
 public:
  using K = Key<kWords>;
  using Entry = KeyEntry<kWords>;

  explicit BucketKeys(const VocabularyOptions& options) : Vocabulary(options) {
    Clear();
  }

  int words() const override { return kWords; }

  absl::Status Learn(const std::vector<KeyRequest>& requests, bool advance,
                     std::vector<int32_t>* resets) override {
    tensorflow::mutex_lock lock(mutex_);
    resets_ = resets;
    if (advance) Advance();
    std::vector<Unsettled> unsettled;
    for (const KeyRequest& request : requests) {
      const bool mine =
          Visit(request, [&](int64_t i, int64_t bucket, uint64_t hash,
                             const K& key, Entry* entry) {
            const uint32_t count = request.counts ? request.counts[i] : 1;
            if (entry && entry->admitted() && !IsExpired(*entry)) {
              Count(count, entry);
              request.rows[i] = Row(first_ + bucket, entry->slot());
            } else {
              unsettled.push_back({bucket, key, hash, count, &request.rows[i]});
            }
          });
      if (!mine) return WrongOwnerError();
    }
    return SettleAll(&unsettled);
  }

  absl::Status Find(const std::vector<KeyRequest>& requests) override {
    tensorflow::mutex_lock lock(mutex_);
    for (const KeyRequest& request : requests) {
      const bool mine = Visit(request, [&](int64_t i, int64_t bucket, uint64_t,
                                           const K&, Entry* entry) {
        request.rows[i] = RowOf(bucket, entry);
      });
      if (!mine) return WrongOwnerError();
    }
    return absl::OkStatus();
  }

  VocabularyCounts Counts() override {
    tensorflow::mutex_lock lock(mutex_);
    VocabularyCounts counts = totals_;
    for (const Bucket& bucket : buckets_) {
      counts.rows += bucket.free.used();
      counts.candidates += bucket.candidates;
    }
    counts.step = now_;
    return counts;
  }

  void Export(const KeyArrays& rows, const KeyArrays& candidates) override {
    tensorflow::mutex_lock lock(mutex_);
    std::vector<Entry> found;
    for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
      found.clear();
      keys_.ForEach(bucket, [&](const Entry& entry) {
        if (!entry.admitted()) {
          found.push_back(entry);
        } else {
          Write(entry, bucket * slots() + entry.slot(), rows);
        }
      });
      // Sorted, so that a checkpoint does not depend on the order in memory.
      std::sort(found.begin(), found.end(),
                [](const Entry& a, const Entry& b) { return a.key < b.key; });
      for (size_t i = 0; i < found.size(); ++i) {
        Write(found[i], bucket * candidate_slots() + i, candidates);
      }
    }
  }

  absl::Status Import(int64_t buckets, const HashKey& hash_key, int64_t step,
                      const KeyArrays& rows, int64_t row_slots,
                      const KeyArrays& candidates,
                      int64_t candidate_slots) override {
    tensorflow::mutex_lock lock(mutex_);
    bits_ = BitsOf(buckets);
    for (int i = 0; i < 2; ++i) hash_key_[i] = hash_key.words[i];
    Clear();
    now_ = static_cast<uint32_t>(step);
    for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
      Bucket& own = buckets_[bucket];
      for (int64_t slot = 0; slot < row_slots; ++slot) {
        const int64_t at = bucket * row_slots + slot;
        if (rows.counts[at] <= 0) continue;
        if (slot >= own.limit) return CapacityError();
        own.free.Take(slot);
        TF_RETURN_IF_ERROR(Read(rows, at, bucket, Entry::kFirstSlot + slot));
      }
      for (int64_t i = 0; i < candidate_slots; ++i) {
        const int64_t at = bucket * candidate_slots + i;
        // The arrays may contain more or fewer candidates than fit, if their
        // vocabulary had another min_count.
        if (candidates.counts[at] <= 0) continue;
        if (own.candidates == own.most_candidates) break;
        ++own.candidates;
        TF_RETURN_IF_ERROR(Read(candidates, at, bucket, Entry::kCandidate));
      }
    }
    return absl::OkStatus();
  }

 private:
  struct Bucket {
    int64_t limit = 0;
    int64_t candidates = 0;
    int64_t most_candidates = 0;
    FreeSlots free;
  };

  // A key of the step that has no row yet.
  struct Unsettled {
    int64_t bucket;
    K key;
    uint64_t hash;
    uint32_t count;
    int32_t* row;

    bool operator<(const Unsettled& other) const {
      return bucket != other.bucket ? bucket < other.bucket : key < other.key;
    }
  };

  // A key of the current bucket, with all its occurrences in the step.
  struct Asking {
    typename std::vector<Unsettled>::iterator first, end;
    uint32_t count = 0;
  };

  static int BitsOf(int64_t buckets) {
    int bits = 0;
    while (int64_t{1} << bits < buckets) ++bits;
    return bits;
  }

  void Clear() {
    const auto [first, end] = OwnBuckets(buckets());
    first_ = first;
    buckets_.assign(end - first, {});
    for (size_t i = 0; i < buckets_.size(); ++i) {
      Bucket& bucket = buckets_[i];
      bucket.limit = Limit(first_ + i);
      bucket.most_candidates = options_.min_count > 1 ? bucket.limit : 0;
      bucket.free.Reset(bucket.limit);
    }
    keys_.Reset(buckets_.size(), slots() + candidate_slots());
    now_ = 0;
  }

  void Advance() {
    ++now_;
    if (options_.steps_to_live == 0) return;
    // Sweeps one bucket every `every` steps. Expired keys of other buckets lose
    // their rows when their bucket is swept, or when the rows are needed.
    const int64_t every = std::max<int64_t>(slots() / kSlotsPerStep, 1);
    if (now_ % every != 0) return;
    const int64_t turn = now_ / every % buckets();
    if (turn >= first_ && turn < first_ + static_cast<int64_t>(buckets_.size()))
      Sweep(turn - first_);
  }

  // Calls visit(i, bucket, hash, key, entry) for all keys of a request. Returns
  // false if another rank owns one of them.
  template <typename Visitor>
  bool Visit(const KeyRequest& request, const Visitor& visit) {
    constexpr int64_t kAhead = 64;  // number of keys to prefetch ahead
    uint64_t hashes[2 * kAhead];    // of the keys at i % (2 * kAhead)
    const int bits = bits_;
    const HashKey hash_key = this->hash_key();
    const int64_t first_bucket = first_;
    const uint64_t owned = buckets_.size();
    const auto hash_from = [&](int64_t first) {
      HashKeys<kWords>(
          static_cast<const char*>(request.keys) + first * sizeof(K),
          std::min(kAhead, request.size - first), hash_key,
          hashes + first % (2 * kAhead));
    };
    const auto bucket_at = [&](int64_t i) {
      return BucketOf(hashes[i % (2 * kAhead)], bits) - first_bucket;
    };
    const auto prefetch = [&](int64_t i) {
      const int64_t bucket = bucket_at(i);
      if (static_cast<uint64_t>(bucket) >= owned) return false;
      keys_.Prefetch(bucket, hashes[i % (2 * kAhead)]);
      return true;
    };
    if (request.size > 0) hash_from(0);
    for (int64_t i = 0; i < std::min(kAhead, request.size); ++i) {
      if (!prefetch(i)) return false;
    }
    for (int64_t i = 0; i < request.size; ++i) {
      const int64_t next = i + kAhead;
      if (next < request.size) {
        if (next % kAhead == 0) hash_from(next);
        if (!prefetch(next)) return false;
      }
      const uint64_t hash = hashes[i % (2 * kAhead)];
      const int64_t bucket = bucket_at(i);
      const K key = K::At(request.keys, i);
      visit(i, bucket, hash, key, keys_.Find(bucket, hash, key));
    }
    return true;
  }

  bool IsExpired(const Entry& entry) const {
    return options_.steps_to_live > 0 &&
           int64_t{now_} - entry.step > options_.steps_to_live;
  }

  int32_t RowOf(int64_t bucket, const Entry* entry) const {
    if (entry && !IsExpired(*entry)) {
      if (entry->admitted()) return Row(first_ + bucket, entry->slot());
      // There was no free row for it.
      if (entry->count >= options_.min_count) return 0;
    } else if (options_.full_shares && options_.min_count == 1 &&
               buckets_[bucket].free.used() == buckets_[bucket].limit) {
      return 0;  // the bucket is full and stores no candidates
    }
    return options_.Unadmitted();
  }

  void Count(uint32_t count, Entry* entry) {
    entry->count +=
        std::min(count, std::numeric_limits<uint32_t>::max() - entry->count);
    entry->step = now_;
  }

  absl::Status SettleAll(std::vector<Unsettled>* unsettled) {
    std::sort(unsettled->begin(), unsettled->end());
    for (auto first = unsettled->begin(); first != unsettled->end();) {
      auto end = first;
      while (end != unsettled->end() && end->bucket == first->bucket) ++end;
      TF_RETURN_IF_ERROR(Settle(first->bucket, first, end));
      first = end;
    }
    return absl::OkStatus();
  }

  using Iterator = typename std::vector<Unsettled>::iterator;

  absl::Status Settle(int64_t bucket, Iterator first, Iterator end) {
    std::vector<Asking> admitted;    // keys to admit, or admitted already
    std::vector<Asking> candidates;  // new candidates
    while (first != end) {
      Asking asking;
      asking.first = first;
      for (; first != end && first->key == asking.first->key; ++first) {
        asking.count += std::min(
            first->count, std::numeric_limits<uint32_t>::max() - asking.count);
        *first->row = options_.Unadmitted();
      }
      asking.end = first;
      Entry* entry = EntryOf(bucket, asking);
      if (entry && IsExpired(*entry)) {
        ++totals_.expired;
        Remove(bucket, entry);
        entry = nullptr;
      }
      if (entry) {
        Count(asking.count, entry);
        asking.count = entry->count;
      }
      if (asking.count >= options_.min_count) {
        admitted.push_back(asking);
      } else if (!entry) {
        candidates.push_back(asking);
      }
    }
    TF_RETURN_IF_ERROR(Admit(bucket, admitted, &candidates));
    Remember(bucket, candidates);
    return absl::OkStatus();
  }

  Entry* EntryOf(int64_t bucket, const Asking& asking) {
    return keys_.Find(bucket, asking.first->hash, asking.first->key);
  }

  absl::Status Admit(int64_t bucket, const std::vector<Asking>& all,
                     std::vector<Asking>* candidates) {
    Bucket& own = buckets_[bucket];
    const int64_t wanted = all.size();
    if (wanted > own.limit - own.free.used()) EvictFor(bucket, wanted);
    for (const Asking& asking : all) {
      Entry* entry = EntryOf(bucket, asking);
      int32_t row = 0;
      if (own.free.used() < own.limit) {
        if (entry) {
          --own.candidates;
        } else {
          entry = keys_.Insert(bucket, asking.first->hash, asking.first->key);
          entry->count = asking.count;
          entry->step = now_;
        }
        entry->place = Entry::kFirstSlot + own.free.TakeFirst();
        ++totals_.admitted;
        row = Row(first_ + bucket, entry->slot());
      } else if (!options_.full_shares) {
        return FullBucket(bucket);
      } else if (!entry) {
        candidates->push_back(asking);
      }
      for (auto each = asking.first; each != asking.end; ++each) {
        *each->row = row;
      }
    }
    return absl::OkStatus();
  }

  absl::Status FullBucket(int64_t bucket) const {
    int64_t rows = 0, used = 0;
    for (const Bucket& each : buckets_) {
      rows += each.limit;
      used += each.free.used();
    }
    return Full(first_ + bucket, used, rows);
  }

  // Takes rows from keys that are not in this step, if eviction is allowed,
  // until `wanted` rows are free.
  void EvictFor(int64_t bucket, int64_t wanted) {
    Bucket& own = buckets_[bucket];
    if (options_.steps_to_live > 0) Sweep(bucket);
    const int64_t missing = wanted - (own.limit - own.free.used());
    if (missing <= 0 || options_.evict == VocabularyOptions::Evict::kNone)
      return;
    totals_.evicted +=
        RemoveFirst(bucket, true, std::max(missing, own.limit / kShare));
  }

  // Adds candidates. If there is no space, they replace the candidates that
  // were not seen for the longest time.
  void Remember(int64_t bucket, const std::vector<Asking>& all) {
    Bucket& own = buckets_[bucket];
    const int64_t missing =
        own.candidates + static_cast<int64_t>(all.size()) - own.most_candidates;
    if (missing > 0) {
      RemoveFirst(bucket, false,
                  std::max(missing, own.most_candidates / kShare));
    }
    for (const Asking& asking : all) {
      if (own.candidates == own.most_candidates) return;
      Entry* entry =
          keys_.Insert(bucket, asking.first->hash, asking.first->key);
      entry->count = asking.count;
      entry->step = now_;
      entry->place = Entry::kCandidate;
      ++own.candidates;
    }
  }

  // Removes the first `count` keys in the order of eviction, but no keys of
  // this step. Removes only keys with rows if `admitted`, and otherwise only
  // candidates. Returns the number of removed keys.
  int64_t RemoveFirst(int64_t bucket, bool admitted, int64_t count) {
    struct Old {
      uint32_t first, second;
      K key;
      bool operator<(const Old& other) const {
        if (first != other.first) return first < other.first;
        return second != other.second ? second < other.second : key < other.key;
      }
    };
    const bool by_count =
        admitted && options_.evict == VocabularyOptions::Evict::kLfu;
    std::vector<Old> old;
    keys_.ForEach(bucket, [&](const Entry& entry) {
      if (entry.admitted() != admitted || entry.step == now_) return;
      old.push_back(by_count ? Old{entry.count, entry.step, entry.key}
                             : Old{entry.step, entry.count, entry.key});
    });
    count = std::min<int64_t>(count, old.size());
    std::nth_element(old.begin(), old.begin() + count, old.end());
    for (int64_t i = 0; i < count; ++i) {
      Remove(bucket, Known(bucket, old[i].key));
    }
    return count;
  }

  void Sweep(int64_t bucket) {
    std::vector<K> expired;
    keys_.ForEach(bucket, [&](const Entry& entry) {
      if (IsExpired(entry)) expired.push_back(entry.key);
    });
    totals_.expired += expired.size();
    for (const K& key : expired) {
      Remove(bucket, Known(bucket, key));
    }
  }

  Entry* Known(int64_t bucket, const K& key) {
    return keys_.Find(bucket, key.Hash(hash_key()), key);
  }

  void Remove(int64_t bucket, Entry* entry) {
    Bucket& own = buckets_[bucket];
    if (entry->admitted()) {
      own.free.Free(entry->slot());
      resets_->push_back(Row(first_ + bucket, entry->slot()));
    } else {
      --own.candidates;
    }
    keys_.Erase(bucket, entry);
  }

  void Write(const Entry& entry, int64_t at, const KeyArrays& arrays) const {
    std::memcpy(arrays.keys + at * kWords, &entry.key, sizeof(K));
    arrays.counts[at] = entry.count;
    arrays.steps[at] = entry.step;
  }

  absl::Status Read(const KeyArrays& arrays, int64_t at, int64_t bucket,
                    int32_t place) {
    const K key = K::At(arrays.keys, at);
    const uint64_t hash = key.Hash(hash_key());
    if (BucketOf(hash, bits_) != first_ + bucket ||
        keys_.Find(bucket, hash, key)) {
      return DamagedKeysError();
    }
    Entry* entry = keys_.Insert(bucket, hash, key);
    const int64_t most = std::numeric_limits<uint32_t>::max();
    entry->count = std::min(arrays.counts[at], most);
    entry->step = arrays.steps[at];
    entry->place = place;
    return absl::OkStatus();
  }

  // The share of its rows that a full bucket takes back at once, because the
  // search for many rows takes as long as the search for one.
  static constexpr int64_t kShare = 16;
  // The average number of slots per step that the search for expired keys
  // reads.
  static constexpr int64_t kSlotsPerStep = 4096;

  tensorflow::mutex mutex_;
  int64_t first_ = 0;
  std::vector<Bucket> buckets_;
  KeyTable<kWords> keys_;
  uint32_t now_ = 0;
  VocabularyCounts totals_;
  std::vector<int32_t>* resets_ = nullptr;  // of the current step
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_BUCKET_KEYS_H_
