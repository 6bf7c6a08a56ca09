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

// A key of a vocabulary: one word, or the two of a string's fingerprint.
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

  // As signed numbers, which keys of one word are to their users.
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
    if (__builtin_expect(!key.IsZero(), 1)) return SipHash(words, key);
    // The finalizer of MurmurHash3 in 64 bits, which can be inverted.
    uint64_t x = words[0];
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD;
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53;
    return x ^ x >> 33;
  }
};

// The bucket of a key, of 2^bits; the lower bits place it within the bucket.
inline int64_t BucketOf(uint64_t hash, int bits) {
  return bits == 0 ? 0 : static_cast<int64_t>(hash >> (64 - bits));
}

// What is known of a key. All of it lies in one cache line or two, so that a
// key that is found is counted without another miss.
template <int kWords>
struct KeyEntry {
  Key<kWords> key;
  uint32_t count;
  uint32_t step;  // when it was last seen
  int32_t place;  // kNone, kCandidate, or its slot of the bucket + kFirstSlot
  uint32_t hash;  // its lower bits
  static constexpr int32_t kNone = 0;
  static constexpr int32_t kCandidate = 1;
  static constexpr int32_t kFirstSlot = 2;

  bool admitted() const { return place >= kFirstSlot; }
  int32_t slot() const { return place - kFirstSlot; }
};

// A hash table for each of some buckets, behind each other: linear probing, and
// removal without marks that would slow down later searches. Memory that was
// never used is not touched before it is.
template <int kWords>
class KeyTable {
 public:
  using Entry = KeyEntry<kWords>;

  // Of `buckets` buckets of at most `most` keys each.
  void Reset(int64_t buckets, int64_t most) {
    // A search meets two or three entries at this load.
    size_ = most + most * 2 / 5 + 8;
    const size_t bytes = std::max<int64_t>(buckets * size_, 1) * sizeof(Entry);
    // Every search is somewhere else: without huge pages, each would look up a
    // page first. They begin at multiples of their size.
    const bool huge = bytes >= kHugePage * 3 / 4;
    const size_t room = huge ? (bytes + 2 * kHugePage - 1) & -kHugePage : bytes;
    // Zeros from the system: all of them free.
    memory_.reset(static_cast<char*>(std::calloc(room, 1)));
    if (memory_ == nullptr) throw std::bad_alloc();
    char* first = memory_.get();
    if (huge) {
      first += -reinterpret_cast<uintptr_t>(first) & (kHugePage - 1);
      AdviseHugePages(first, (bytes + kHugePage - 1) & -kHugePage);
    }
    entries_ = reinterpret_cast<Entry*>(first);
  }

  // Into the second level of the cache, where more lines may be under way at
  // once than to the first one.
  void Prefetch(int64_t bucket, uint64_t hash) const {
    const Entry* const entry = &entries_[bucket * size_ + Home(hash)];
    const char* const next_end = reinterpret_cast<const char*>(entry + 2) - 1;
    __builtin_prefetch(entry, 0, 2);
    // Often the search goes on to the next entry.
    __builtin_prefetch(next_end, 0, 2);
  }

  Entry* Find(int64_t bucket, uint64_t hash, const Key<kWords>& key) {
    Entry* entry = Place(bucket, hash, key);
    return entry->place == Entry::kNone ? nullptr : entry;
  }

  // Adds a key that is not there.
  Entry* Insert(int64_t bucket, uint64_t hash, const Key<kWords>& key) {
    Entry* entry = Place(bucket, hash, key);
    entry->key = key;
    entry->hash = static_cast<uint32_t>(hash);
    return entry;
  }

  // Entries behind the gap move up if they may, so that none is cut off from
  // where its search begins. Other entries' addresses change.
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

  // Calls visit(entry) for all of a bucket.
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

  // The entry of a key, or the free one where it belongs.
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
  Entry* entries_ = nullptr;  // in it
  int64_t size_ = 0;          // of a bucket
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_KEY_TABLE_H_
