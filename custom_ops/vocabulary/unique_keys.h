// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
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

// The unique keys of lists, by the rank that owns them.
template <int kWords>
class UniqueKeys {
 public:
  // `positions` has room for a number per key: its place among the unique ones.
  UniqueKeys(const std::vector<KeyList>& lists, const Vocabulary& vocabulary,
             int32_t* positions) {
    int64_t size = 0;
    for (const KeyList& list : lists) size += list.size;
    std::vector<Key<kWords>> keys(size + 1);
    std::vector<uint32_t> counts(size + 1);
    const int64_t unique =
        Find(lists, size, keys.data(), counts.data(), positions);
    SortByOwner(keys.data(), counts.data(), unique, vocabulary);
    for (int64_t i = 0; i < size; ++i) positions[i] = moved_[positions[i]];
  }

  int64_t SizeFor(int64_t rank) const { return ends_[rank] - Begin(rank); }

  // Bytes that Write() writes.
  int64_t BytesFor(int64_t rank) const {
    const int64_t size = SizeFor(rank);
    int64_t bytes = VarintSize(size) + 1 + size * sizeof(Key<kWords>);
    if (EachOnce(rank)) return bytes;
    for (int64_t i = Begin(rank); i < ends_[rank]; ++i) {
      bytes += VarintSize(counts_[i]);
    }
    return bytes;
  }

  uint8_t* Write(int64_t rank, uint8_t* out) const {
    const int64_t begin = Begin(rank);
    const int64_t size = SizeFor(rank);
    const bool once = EachOnce(rank);
    out = PutVarint(size, out);
    out = PutVarint(once, out);
    std::memcpy(out, keys_.data() + begin, size * sizeof(Key<kWords>));
    out += size * sizeof(Key<kWords>);
    for (int64_t i = begin; !once && i < begin + size; ++i) {
      out = PutVarint(counts_[i], out);
    }
    return out;
  }

 private:
  int64_t Begin(int64_t rank) const { return rank == 0 ? 0 : ends_[rank - 1]; }

  bool EachOnce(int64_t rank) const {
    return std::all_of(counts_.begin() + Begin(rank),
                       counts_.begin() + ends_[rank],
                       [](uint32_t count) { return count == 1; });
  }

  // Numbers keys in the order in which they come. Whether one is new is as good
  // as random, so no branch depends on it: the next new one is always written.
  static int64_t Find(const std::vector<KeyList>& lists, int64_t size,
                      Key<kWords>* keys, uint32_t* counts, int32_t* positions) {
    int bits = 4;
    while (int64_t{1} << bits < size * 2) ++bits;
    std::vector<int32_t> places(size_t{1} << bits, -1);
    const uint64_t mask = places.size() - 1;
    int32_t unique = 0;
    for (const KeyList& list : lists) {
      for (int64_t i = 0; i < list.size; ++i) {
        const auto key = Key<kWords>::At(list.keys, i);
        uint64_t at = key.Hash() & mask;
        int32_t place = places[at];
        keys[unique] = key;
        place = place < 0 ? unique : place;
        while (!(keys[place] == key)) {
          at = (at + 1) & mask;
          place = places[at] < 0 ? unique : places[at];
        }
        places[at] = place;
        unique += place == unique;
        ++counts[place];
        *positions++ = place;
      }
    }
    return unique;
  }

  void SortByOwner(const Key<kWords>* keys, const uint32_t* counts,
                   int64_t unique, const Vocabulary& vocabulary) {
    const int bits = vocabulary.bits();
    std::vector<int32_t> owners(unique);
    ends_.assign(vocabulary.options().world_size, 0);
    for (int64_t i = 0; i < unique; ++i) {
      owners[i] = vocabulary.OwnerOf(BucketOf(keys[i].Hash(), bits));
      ++ends_[owners[i]];
    }
    int64_t end = 0;
    for (int64_t& each : ends_) {
      const int64_t begin = end;
      end += each;
      each = begin;  // moves on to the end below
    }
    moved_.resize(unique);
    keys_.resize(unique);
    counts_.resize(unique);
    for (int64_t i = 0; i < unique; ++i) {
      const int64_t place = ends_[owners[i]]++;
      moved_[i] = place;
      keys_[place] = keys[i];
      counts_[place] = counts[i];
    }
  }

  std::vector<Key<kWords>> keys_;
  std::vector<uint32_t> counts_;
  std::vector<int32_t> moved_;  // from the order in which they came
  std::vector<int64_t> ends_;   // of every rank's keys
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_UNIQUE_KEYS_H_
