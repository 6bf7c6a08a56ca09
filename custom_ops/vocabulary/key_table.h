// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_KEY_TABLE_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_KEY_TABLE_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "custom_ops/common/huge_pages.h"
#include "custom_ops/vocabulary/hash_key.h"

namespace tfdist {

// A key of a vocabulary: one word, or the two words of a string's fingerprint.
template <int kWords>
struct Key {
  uint64_t words[kWords];

  static Key At(const void* keys, int64_t index) {
    Key key;
    std::memcpy(&key, static_cast<const char*>(keys) + index * sizeof(Key),
                sizeof(Key));
    return key;
  }

  bool operator==(const Key& other) const {
    bool equal = true;
    for (int i = 0; i < kWords; ++i) equal &= words[i] == other.words[i];
    return equal;
  }

  // Compares words as signed numbers, because keys of one word are signed ids
  // to users.
  bool operator<(const Key& other) const {
    for (int i = 0; i < kWords; ++i) {
      if (words[i] != other.words[i]) {
        return static_cast<int64_t>(words[i]) <
               static_cast<int64_t>(other.words[i]);
      }
    }
    return false;
  }

  uint64_t Hash(const HashKey& key) const {
    return key.IsZero() ? HashWithoutSecret(words[0]) : SipHash(words, key);
  }
};

// Returns the bucket of a key among 2^bits buckets. The lower bits of the hash
// determine the position in the bucket.
inline int64_t BucketOf(uint64_t hash, int bits) {
  return bits == 0 ? 0 : static_cast<int64_t>(hash >> (64 - bits));
}

// The data of a key. It fits into one or two cache lines, so that counting a
// key after the search causes no further cache miss.
template <int kWords>
struct KeyEntry {
  Key<kWords> key;
  uint32_t count;
  uint32_t step;  // when the key was last seen
  int32_t place;  // kNone, kCandidate, or its slot in the bucket + kFirstSlot
  uint32_t hash;  // the lower bits of its hash
  static constexpr int32_t kNone = 0;
  static constexpr int32_t kCandidate = 1;
  static constexpr int32_t kFirstSlot = 2;

  bool admitted() const { return place >= kFirstSlot; }
  int32_t slot() const { return place - kFirstSlot; }
};

// Hash tables, one for each of several buckets, in one block of memory. They
// use linear probing, and removal without tombstones, which would slow down
// later searches. Memory that has not been used is not touched.
template <int kWords>
class KeyTable {
 public:
  using Entry = KeyEntry<kWords>;

  // Creates `buckets` buckets of at most `most` keys each.
  void Reset(int64_t buckets, int64_t most) {
    // At this load, a search reads two or three entries.
    size_ = most + most * 2 / 5 + 8;
    const size_t bytes = std::max<int64_t>(buckets * size_, 1) * sizeof(Entry);
    // Uses huge pages, because every search reads another address and would
    // otherwise also miss the processor's page cache (TLB). Huge pages begin at
    // multiples of their size.
    const bool huge = bytes >= kHugePage * 3 / 4;
    const size_t allocated =
        huge ? (bytes + 2 * kHugePage - 1) & -kHugePage : bytes;
    // The system returns zeros, which mark all entries as free.
    memory_.reset(static_cast<char*>(std::calloc(allocated, 1)));
    if (memory_ == nullptr) throw std::bad_alloc();
    char* first = memory_.get();
    if (huge) {
      first += -reinterpret_cast<uintptr_t>(first) & (kHugePage - 1);
      AdviseHugePages(first, (bytes + kHugePage - 1) & -kHugePage);
    }
    entries_ = reinterpret_cast<Entry*>(first);
  }

  // Prefetches into the second-level cache, which can have more outstanding
  // misses than the first-level cache.
  void Prefetch(int64_t bucket, uint64_t hash) const {
    const Entry* const entry = &entries_[bucket * size_ + Home(hash)];
    const char* const next_end = reinterpret_cast<const char*>(entry + 2) - 1;
    __builtin_prefetch(entry, 0, 2);
    // The search often continues to the next entry.
    __builtin_prefetch(next_end, 0, 2);
  }

  Entry* Find(int64_t bucket, uint64_t hash, const Key<kWords>& key) {
    Entry* entry = Place(bucket, hash, key);
    return entry->place == Entry::kNone ? nullptr : entry;
  }

  // Adds a key that is not in the table.
  Entry* Insert(int64_t bucket, uint64_t hash, const Key<kWords>& key) {
    Entry* entry = Place(bucket, hash, key);
    entry->key = key;
    entry->hash = static_cast<uint32_t>(hash);
    return entry;
  }

  // Removes an entry. Moves entries after the gap forward if necessary, so that
  // each search still finds its entry. Pointers to other entries become
  // invalid.
  void Erase(int64_t bucket, Entry* entry) {
    Entry* const first = &entries_[bucket * size_];
    int64_t gap = entry - first;
    for (int64_t at = Next(gap); first[at].place != Entry::kNone;
         at = Next(at)) {
      const int64_t home = Home(first[at].hash);
      if (Distance(home, at) >= Distance(gap, at)) {
        first[gap] = first[at];
        gap = at;
      }
    }
    first[gap] = Entry{};
  }

  // Calls visit(entry) for all entries of a bucket.
  template <typename Visit>
  void ForEach(int64_t bucket, const Visit& visit) const {
    const Entry* const first = &entries_[bucket * size_];
    for (int64_t i = 0; i < size_; ++i) {
      if (first[i].place != Entry::kNone) visit(first[i]);
    }
  }

 private:
  int64_t Home(uint64_t hash) const {
    return static_cast<int64_t>((hash & 0xFFFFFFFF) * size_ >> 32);
  }
  int64_t Next(int64_t at) const { return at + 1 == size_ ? 0 : at + 1; }
  int64_t Distance(int64_t from, int64_t to) const {
    return to >= from ? to - from : to + size_ - from;
  }

  // Returns the entry of a key, or the free entry for it.
  Entry* Place(int64_t bucket, uint64_t hash, const Key<kWords>& key) {
    Entry* const first = &entries_[bucket * size_];
    int64_t at = Home(hash);
    while (first[at].place != Entry::kNone && !(first[at].key == key)) {
      at = Next(at);
    }
    return first + at;
  }

  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char[], Free> memory_;
  Entry* entries_ = nullptr;  // the entries in memory_
  int64_t size_ = 0;          // entries of a bucket
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_KEY_TABLE_H_
