// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_ROTATED_MOD_H_
#define TFDIST_CUSTOM_OPS_CODEC_ROTATED_MOD_H_

#include <cstdint>

#include "custom_ops/common/counter_random.h"

namespace tfdist {

// The owner and the local row of each row of a table ("rotated mod").
//
// The ids of a table are divided into blocks of `world_size` consecutive ids.
// Each rank holds exactly one row of each block, at local row `block`. A hash
// of the block rotates the assignment of its ids to ranks. Sequential ids are
// thus distributed evenly, and so are ids whose stride has a common factor with
// the world size.
//
//   block = id / W,  owner = (id + hash(block)) mod W,  local row = block
class RotatedMod {
 public:
  // With ids up to 2^40 and up to 2^20 ranks, the divisions by multiplication
  // below are exact.
  static constexpr int64_t kMaxRows = int64_t{1} << 40;
  static constexpr int64_t kMaxWorldSize = int64_t{1} << 20;

  TFDIST_INLINE explicit RotatedMod(uint64_t world_size)
      : world_size_(world_size),
        inverse_(world_size == 1 ? 0 : ~uint64_t{0} / world_size + 1) {}

  uint64_t LocalRow(uint64_t id) const {
    return world_size_ == 1 ? id : HighProduct(inverse_, id);
  }

  uint64_t Owner(uint64_t id, uint64_t local_row) const {
    const uint64_t owner = id - local_row * world_size_ + Rotation(local_row);
    return owner >= world_size_ ? owner - world_size_ : owner;
  }

  TFDIST_INLINE uint64_t Id(uint64_t rank, uint64_t local_row) const {
    const uint64_t rotation = Rotation(local_row);
    const uint64_t offset =
        rank >= rotation ? rank - rotation : rank + world_size_ - rotation;
    return local_row * world_size_ + offset;
  }

  // Returns the rows of every shard, including padding.
  static int64_t LocalRows(int64_t rows, int64_t world_size) {
    return (rows + world_size - 1) / world_size;
  }

 private:
  TFDIST_INLINE static uint64_t HighProduct(uint64_t a, uint64_t b) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
  }

  // Returns hash(block) mod world_size, without a division (Lemire's fastmod).
  TFDIST_INLINE uint64_t Rotation(uint64_t block) const {
    const uint64_t hash = (block * kGoldenRatio) >> 32;
    return HighProduct(inverse_ * hash, world_size_);
  }

  uint64_t world_size_;
  uint64_t inverse_;  // ceil(2^64 / world_size), 0 for one rank
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_ROTATED_MOD_H_
