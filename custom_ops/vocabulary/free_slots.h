// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_FREE_SLOTS_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_FREE_SLOTS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tfdist {

// The slots of a bucket, with one bit for each slot that is in use. The next
// slot is always the lowest free one. It depends only on which slots are in
// use, not on their history, so a training that continues from a checkpoint
// gets the same slots.
class FreeSlots {
 public:
  void Reset(int64_t slots) {
    bits_.assign((slots + 63) / 64, 0);
    first_ = used_ = 0;
  }

  int64_t used() const { return used_; }

  // Takes the lowest free slot. Requires that there is one.
  int64_t TakeFirst() {
    while (~bits_[first_] == 0) ++first_;
    const int64_t slot = first_ * 64 + __builtin_ctzll(~bits_[first_]);
    Take(slot);
    return slot;
  }

  void Take(int64_t slot) {
    bits_[slot / 64] |= uint64_t{1} << slot % 64;
    ++used_;
  }

  void Free(int64_t slot) {
    bits_[slot / 64] &= ~(uint64_t{1} << slot % 64);
    first_ = std::min(first_, slot / 64);
    --used_;
  }

 private:
  std::vector<uint64_t> bits_;
  int64_t first_ = 0;  // no word before this one has a free slot
  int64_t used_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_FREE_SLOTS_H_
