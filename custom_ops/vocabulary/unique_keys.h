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

// The unique keys of lists, by the rank that owns them. What is kept from step
// to step is memory, which would cost as much to get anew.
template <int kWords>
class UniqueKeys {
 public:
  // `positions` has room for a number per key: its place among the unique ones,
  // once Write() has put these in order.
  void Find(const std::vector<KeyList>& lists, const Vocabulary& vocabulary,
            int32_t* positions) {
    size_ = 0;
    for (const KeyList& list : lists) size_ += list.size;
    positions_ = positions;
    if (static_cast<int64_t>(keys_.size()) <= size_) keys_.resize(size_ + 1);
    counts_.assign(size_ + 1, 0);
    unique_ = Number(lists);
    FindOwners(vocabulary);
  }

  int64_t SizeFor(int64_t rank) const { return owners_[rank].keys; }

  // Bytes for a rank that Write() writes.
  int64_t BytesFor(int64_t rank) const {
    const Owner& owner = owners_[rank];
    return VarintSize(owner.keys) + 1 + owner.keys * sizeof(Key<kWords>) +
           (owner.once() ? 0 : owner.count_bytes);
  }

  // Writes messages, to where `outputs` of every rank points.
  void Write(const std::vector<uint8_t*>& outputs) {
    struct Writing {
      uint8_t* keys;
      uint8_t* counts;
      int64_t place;
      bool once;
    };
    std::vector<Writing> writing;
    int64_t place = 0;
    for (size_t rank = 0; rank < owners_.size(); ++rank) {
      const Owner& owner = owners_[rank];
      uint8_t* out = PutVarint(owner.keys, outputs[rank]);
      out = PutVarint(owner.once(), out);
      writing.push_back(
          {out, out + owner.keys * sizeof(Key<kWords>), place, owner.once()});
      place += owner.keys;
    }
    for (int64_t i = 0; i < unique_; ++i) {
      Writing& to = writing[owner_of_[i]];
      std::memcpy(to.keys, &keys_[i], sizeof(Key<kWords>));
      to.keys += sizeof(Key<kWords>);
      if (!to.once) to.counts = PutVarint(counts_[i], to.counts);
      places_[i] = to.place++;
    }
    for (int64_t i = 0; i < size_; ++i) positions_[i] = places_[positions_[i]];
  }

 private:
  struct Owner {
    int64_t keys = 0;
    int64_t seen = 0;  // times that they were
    int64_t count_bytes = 0;

    bool once() const { return seen == keys; }
  };

  // Numbers keys in the order in which they come. Whether one is new is as good
  // as random, so no branch depends on it: the next new one is always written,
  // and a free place has a number above all.
  int64_t Number(const std::vector<KeyList>& lists) {
    int bits = 4;
    // At most half full: fewer searches go on to a second place, which no
    // processor foresees.
    while (int64_t{1} << bits < 2 * size_) ++bits;
    places_.assign(size_t{1} << bits, std::numeric_limits<uint32_t>::max());
    const uint64_t mask = places_.size() - 1;
    uint32_t* const places = places_.data();
    Key<kWords>* const keys = keys_.data();
    uint32_t* const counts = counts_.data();
    int32_t* position = positions_;
    uint32_t unique = 0;
    for (const KeyList& list : lists) {
      for (int64_t i = 0; i < list.size; ++i) {
        const auto key = Key<kWords>::At(list.keys, i);
        uint64_t at = key.Hash() & mask;
        uint32_t place = std::min(places[at], unique);
        keys[unique] = key;
        while (__builtin_expect(!(keys[place] == key), 0)) {
          at = (at + 1) & mask;
          place = std::min(places[at], unique);
        }
        places[at] = place;
        unique += place == unique;
        ++counts[place];
        *position++ = place;
      }
    }
    return unique;
  }

  void FindOwners(const Vocabulary& vocabulary) {
    const int bits = vocabulary.bits();
    owners_.assign(vocabulary.options().world_size, {});
    if (static_cast<int64_t>(owner_of_.size()) < unique_) {
      owner_of_.resize(unique_);
    }
    for (int64_t i = 0; i < unique_; ++i) {
      const int32_t rank = vocabulary.OwnerOf(BucketOf(keys_[i].Hash(), bits));
      owner_of_[i] = rank;
      Owner& owner = owners_[rank];
      ++owner.keys;
      owner.seen += counts_[i];
      owner.count_bytes += VarintSize(counts_[i]);
    }
  }

  std::vector<Key<kWords>> keys_;
  std::vector<uint32_t> counts_;
  std::vector<uint32_t> places_;  // by hash, then by number
  std::vector<int32_t> owner_of_;
  std::vector<Owner> owners_;
  int64_t size_ = 0;
  int64_t unique_ = 0;
  int32_t* positions_ = nullptr;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_
