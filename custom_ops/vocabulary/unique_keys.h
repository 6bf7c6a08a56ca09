// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "custom_ops/codec/header_bytes.h"
#include "custom_ops/vocabulary/hash_keys.h"
#include "custom_ops/vocabulary/key_table.h"
#include "custom_ops/vocabulary/vocabulary.h"

namespace tfdist {

// A list of keys.
struct KeyList {
  const void* keys;
  int64_t size;
};

// The unique keys of lists. Messages contain them in groups: group 2 r has the
// keys for rank r that occurred once, group 2 r + 1 its other keys. The memory
// is reused from step to step, because new memory would take as much time as
// the work itself.
template <int kWords>
class UniqueKeys {
 public:
  // Finds the unique keys. Sets `positions` to the index of the unique key for
  // each key of the lists.
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
    // A smaller table fits into the cache better.
    unique_ = size_ < std::numeric_limits<uint16_t>::max()
                  ? Number(lists, hash_key, &few_places_, positions)
                  : Number(lists, hash_key, &places_, positions);
    // Only these keys need the hash that determines the buckets.
    HashKeys<kWords>(keys_.data(), unique_, hash_key, hashes_.data());
    FindGroups(vocabulary);
  }

  int64_t size() const { return unique_; }
  int64_t SizeFor(int64_t rank) const {
    return SizeOf(2 * rank) + SizeOf(2 * rank + 1);
  }

  // Returns the number of bytes that Write() writes for a rank.
  int64_t BytesFor(int64_t rank) const {
    const int64_t once = SizeOf(2 * rank), others = SizeOf(2 * rank + 1);
    return VarintSize(once) + VarintSize(others) + (once + others) * kBytes +
           count_bytes_[rank];
  }

  // Writes the message to each rank to its pointer in `outputs`. Sets `places`
  // to the position of each unique key among the keys of all messages.
  void Write(const std::vector<uint8_t*>& outputs, int32_t* places) const {
    // The position of the group's next key, and the address of the key at
    // position 0 if it were in this message.
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

  // Returns a hash for the places of keys within one call. It takes less time
  // than that of the buckets. It is secret too: a user who does not know the
  // hash key cannot choose ids that share a place.
  static uint64_t PlaceHash(const Key<kWords>& key, const HashKey& secret) {
    uint64_t hash = secret.words[0] ^ 0xA0761D6478BD642F;
    const uint64_t factor = (secret.words[1] ^ 0xE7037ED1A0B428DB) | 1;
    for (const uint64_t word : key.words) {
      const auto product = static_cast<unsigned __int128>(hash ^ word) * factor;
      hash =
          static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    return hash;
  }

  // Numbers keys in order of first occurrence. Whether a key is new is
  // unpredictable, so no branch depends on it: the next new key is always
  // written, and a free place contains a number above all others.
  template <typename Place>
  int64_t Number(const std::vector<KeyList>& lists, const HashKey& hash_key,
                 std::vector<Place>* memory, int32_t* position) {
    int bits = 4;
    // The table is at most half full, so that fewer searches continue to a
    // second place, which the processor cannot predict.
    while (int64_t{1} << bits < 2 * size_) ++bits;
    memory->assign(size_t{1} << bits, std::numeric_limits<Place>::max());
    const uint64_t mask = memory->size() - 1;
    Place* const places = memory->data();
    Key<kWords>* const keys = keys_.data();
    uint32_t* const counts = counts_.data();
    uint32_t unique = 0;
    for (const KeyList& list : lists) {
      for (int64_t i = 0; i < list.size; ++i) {
        const auto key = Key<kWords>::At(list.keys, i);
        uint64_t at = PlaceHash(key, hash_key) & mask;
        uint32_t place = std::min<uint32_t>(places[at], unique);
        keys[unique] = key;
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

  // Here, too, no branch depends on whether a key occurred once.
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
  // The first repeats_ elements are the unique keys that occurred more than
  // once.
  std::vector<uint32_t> repeated_;
  std::vector<int64_t> sizes_;        // by group
  std::vector<int64_t> count_bytes_;  // by rank
  int64_t size_ = 0;
  int64_t unique_ = 0;
  int64_t repeats_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_
