// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "custom_ops/vocabulary/key_messages.h"
#include "custom_ops/vocabulary/key_table.h"

namespace tfdist {

// Some lists of keys, behind each other.
struct KeyList {
  const void* keys;
  int64_t size;
};

// The unique keys of lists, by the rank that owns them.
template <int kWords>
class UniqueKeys {
 public:
  // `positions` has room for a number per key: its place among the unique ones.
  UniqueKeys(const std::vector<KeyList>& lists, const Vocabulary& vocabulary,
             int32_t* positions) {
    int64_t size = 0;
    for (const KeyList& list : lists) size += list.size;
    int bits = 4;
    while (int64_t{1} << bits < size * 2) ++bits;
    std::vector<int32_t> places(size_t{1} << bits, -1);
    const uint64_t mask = places.size() - 1;
    int32_t* position = positions;
    for (const KeyList& list : lists) {
      for (int64_t i = 0; i < list.size; ++i) {
        const auto key = Key<kWords>::At(list.keys, i);
        const uint64_t hash = key.Hash();
        uint64_t at = hash & mask;
        while (places[at] >= 0 && !(keys_[places[at]] == key)) {
          at = (at + 1) & mask;
        }
        if (places[at] < 0) {
          places[at] = keys_.size();
          keys_.push_back(key);
          counts_.push_back(0);
          owners_.push_back(
              vocabulary.OwnerOf(BucketOf(hash, vocabulary.bits())));
        }
        ++counts_[places[at]];
        *position++ = places[at];
      }
    }
    SortByOwner(vocabulary.options().world_size, positions, size);
  }

  int64_t SizeFor(int64_t rank) const { return ends_[rank] - Begin(rank); }

  void Write(int64_t rank, KeyMessage* message) const {
    const int64_t begin = Begin(rank);
    const int64_t size = SizeFor(rank);
    message->Varint(size);
    const bool once = std::all_of(&counts_[begin], &counts_[begin] + size,
                                  [](uint32_t count) { return count == 1; });
    message->Varint(once);
    message->Bytes(keys_.data() + begin, size * sizeof(Key<kWords>));
    for (int64_t i = begin; !once && i < begin + size; ++i) {
      message->Varint(counts_[i]);
    }
  }

 private:
  int64_t Begin(int64_t rank) const { return rank == 0 ? 0 : ends_[rank - 1]; }

  void SortByOwner(int64_t ranks, int32_t* positions, int64_t size) {
    ends_.assign(ranks, 0);
    for (const int32_t owner : owners_) ++ends_[owner];
    int64_t end = 0;
    for (int64_t& each : ends_) {
      const int64_t begin = end;
      end += each;
      each = begin;  // moves on to the end below
    }
    std::vector<int32_t> moved(keys_.size());
    std::vector<Key<kWords>> keys(keys_.size());
    std::vector<uint32_t> counts(keys_.size() + 1);  // one can be pointed at
    for (size_t i = 0; i < keys_.size(); ++i) {
      moved[i] = ends_[owners_[i]]++;
      keys[moved[i]] = keys_[i];
      counts[moved[i]] = counts_[i];
    }
    keys_.swap(keys);
    counts_.swap(counts);
    for (int64_t i = 0; i < size; ++i) positions[i] = moved[positions[i]];
  }

  std::vector<Key<kWords>> keys_;
  std::vector<uint32_t> counts_;
  std::vector<int32_t> owners_;
  std::vector<int64_t> ends_;  // of every rank's keys
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_
