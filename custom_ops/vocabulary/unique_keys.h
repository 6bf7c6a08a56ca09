// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "custom_ops/embedding/header_bytes.h"
#include "custom_ops/vocabulary/key_table.h"
#include "custom_ops/vocabulary/vocabulary.h"

namespace tfdist {

// Some lists of keys, behind each other.
struct KeyList {
  const void* keys;
  int64_t size;
};

// The unique keys of lists. Messages have them in groups: 2 r is of keys for
// rank r that were seen once, 2 r + 1 of its others. What is kept from step to
// step is memory, which would cost as much to get anew.
template <int kWords>
class UniqueKeys {
 public:
  // `positions` has room for a number per key: that of its unique key.
  void Find(const std::vector<KeyList>& lists, const Vocabulary& vocabulary,
            int32_t* positions) {
    size_ = 0;
    for (const KeyList& list : lists) size_ += list.size;
    if (static_cast<int64_t>(keys_.size()) <= size_) {
      keys_.resize(size_ + 1);
      counts_.resize(size_ + 1);
      hashes_.resize(size_ + 1);
    }
    const HashKey hash_key = vocabulary.hash_key();
    // What is searched stays in the cache the better the smaller it is.
    unique_ = size_ < std::numeric_limits<uint16_t>::max()
                  ? Number(lists, hash_key, &few_places_, positions)
                  : Number(lists, hash_key, &places_, positions);
    FindGroups(vocabulary);
  }

  int64_t size() const { return unique_; }
  int64_t SizeFor(int64_t rank) const {
    return SizeOf(2 * rank) + SizeOf(2 * rank + 1);
  }

  // Bytes for a rank that Write() writes.
  int64_t BytesFor(int64_t rank) const {
    const int64_t once = SizeOf(2 * rank), others = SizeOf(2 * rank + 1);
    return VarintSize(once) + VarintSize(others) + (once + others) * kBytes +
           count_bytes_[rank];
  }

  // Writes messages, to where `outputs` of every rank points, and where in all
  // of these each of the unique keys is.
  void Write(const std::vector<uint8_t*>& outputs, int32_t* places) const {
    // Of a group: the place of the next key, and where one of place 0 would be.
    struct Group {
      int64_t place;
      uint8_t* keys;
    };
    std::vector<Group> groups;
    std::vector<uint8_t*> counts;
    int64_t place = 0;
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      const int64_t once = SizeOf(2 * rank), others = SizeOf(2 * rank + 1);
      uint8_t* const keys =
          PutVarint(others, PutVarint(once, outputs[rank])) - place * kBytes;
      groups.push_back({place, keys});
      groups.push_back({place + once, keys});
      place += once + others;
      counts.push_back(keys + place * kBytes);
    }
    for (int64_t i = 0; i < unique_; ++i) {
      Group& group = groups[groups_[i]];
      const int64_t at = group.place++;
      std::memcpy(group.keys + at * kBytes, &keys_[i], kBytes);
      places[i] = static_cast<int32_t>(at);
    }
    for (int64_t r = 0; r < repeats_; ++r) {
      const uint32_t i = repeated_[r];
      uint8_t*& to = counts[groups_[i] / 2];
      to = PutVarint(counts_[i], to);
    }
  }

 private:
  static constexpr int64_t kBytes = sizeof(Key<kWords>);

  int64_t SizeOf(int64_t group) const { return sizes_[group]; }

  // Numbers keys in the order in which they come. Whether one is new is as good
  // as random, so no branch depends on it: the next new one is always written,
  // and a free place has a number above all.
  template <typename Place>
  int64_t Number(const std::vector<KeyList>& lists, const HashKey& hash_key,
                 std::vector<Place>* memory, int32_t* position) {
    int bits = 4;
    // At most half full: fewer searches go on to a second place, which no
    // processor foresees.
    while (int64_t{1} << bits < 2 * size_) ++bits;
    memory->assign(size_t{1} << bits, std::numeric_limits<Place>::max());
    const uint64_t mask = memory->size() - 1;
    Place* const places = memory->data();
    Key<kWords>* const keys = keys_.data();
    uint64_t* const hashes = hashes_.data();
    uint32_t* const counts = counts_.data();
    uint32_t unique = 0;
    for (const KeyList& list : lists) {
      for (int64_t i = 0; i < list.size; ++i) {
        const auto key = Key<kWords>::At(list.keys, i);
        const uint64_t hash = key.Hash(hash_key);
        uint64_t at = hash & mask;
        uint32_t place = std::min<uint32_t>(places[at], unique);
        keys[unique] = key;
        hashes[unique] = hash;
        counts[unique] = 0;
        while (__builtin_expect(!(keys[place] == key), 0)) {
          at = (at + 1) & mask;
          place = std::min<uint32_t>(places[at], unique);
        }
        places[at] = static_cast<Place>(place);
        unique += place == unique;
        ++counts[place];
        *position++ = place;
      }
    }
    return unique;
  }

  // No branch depends on whether a key was seen once, either.
  void FindGroups(const Vocabulary& vocabulary) {
    const int bits = vocabulary.bits();
    const int64_t ranks = vocabulary.options().world_size;
    sizes_.assign(2 * ranks, 0);
    count_bytes_.assign(ranks, 0);
    if (static_cast<int64_t>(groups_.size()) <= unique_) {
      groups_.resize(unique_ + 1);
      repeated_.resize(unique_ + 1);
    }
    repeats_ = 0;
    for (int64_t i = 0; i < unique_; ++i) {
      const int64_t rank = vocabulary.OwnerOf(BucketOf(hashes_[i], bits));
      const bool often = counts_[i] > 1;
      groups_[i] = static_cast<int32_t>(2 * rank + often);
      ++sizes_[groups_[i]];
      repeated_[repeats_] = static_cast<uint32_t>(i);
      repeats_ += often;
    }
    for (int64_t r = 0; r < repeats_; ++r) {
      const uint32_t i = repeated_[r];
      count_bytes_[groups_[i] / 2] += VarintSize(counts_[i]);
    }
  }

  std::vector<Key<kWords>> keys_;
  std::vector<uint64_t> hashes_;
  std::vector<uint32_t> counts_;
  std::vector<uint16_t> few_places_;  // by hash
  std::vector<uint32_t> places_;
  std::vector<int32_t> groups_;
  std::vector<uint32_t> repeated_;    // the first repeats_ are unique keys that
                                      // were seen more than once
  std::vector<int64_t> sizes_;        // of groups
  std::vector<int64_t> count_bytes_;  // for ranks
  int64_t size_ = 0;
  int64_t unique_ = 0;
  int64_t repeats_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_
