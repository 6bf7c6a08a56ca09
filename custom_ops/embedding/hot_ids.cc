// SPDX-License-Identifier: Apache-2.0
#include "hot_ids.h"

#include "radix_sort.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::errors::InvalidArgument;

// Tells ranks that hold different lists (FNV-1a, folded to what a section can
// spare).
uint16_t HashOf(const int64_t* ids, int64_t count) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (int64_t i = 0; i < count; ++i) {
    hash = (hash ^ static_cast<uint64_t>(ids[i])) * 0x100000001B3ull;
    hash ^= hash >> 29;
  }
  return static_cast<uint16_t>(hash ^ hash >> 16 ^ hash >> 32 ^ hash >> 48);
}

absl::Status CheckIds(const int64_t* ids, int64_t count,
                      const FeatureGrid& grid) {
  if (count > HotIndex::kMaxIds) {
    return InvalidArgument("Layer '", grid.name, "' has ", count,
                           " hot_ids; at most ", HotIndex::kMaxIds,
                           " are supported");
  }
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] >= 0 && ids[i] < grid.vocabulary_size) continue;
    return InvalidArgument("Layer '", grid.name, "': hot_ids[", i, "]=", ids[i],
                           " is out of range: ids must be at least 0 and ",
                           "below ", grid.vocabulary_size);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status HotIndex::Build(const int64_t* ids, int64_t count,
                             const FeatureGrid& grid) {
  TF_RETURN_IF_ERROR(CheckIds(ids, count, grid));
  const int bits = BitWidth(4 * count);  // mostly empty: few collisions
  slots_.assign(size_t{1} << bits, kEmpty);
  mask_ = slots_.size() - 1;
  shift_ = 64 - bits;
  parts_.assign(grid.row_parts, 0);
  const RotatedMod placement(grid.row_parts);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t id = ids[i];
    uint64_t slot = Slot(id);
    for (; slots_[slot] != kEmpty; slot = (slot + 1) & mask_) {
      if (slots_[slot] >> kIndexBits != id) continue;
      return InvalidArgument("Layer '", grid.name, "': hot_ids has ", id,
                             " twice");
    }
    const uint64_t part = placement.Owner(id, placement.LocalRow(id));
    slots_[slot] = id << kIndexBits | static_cast<uint64_t>(parts_[part]++);
  }
  hash_ = HashOf(ids, count);
  return absl::OkStatus();
}

absl::Status HotRows::Build(const int64_t* ids, int64_t count,
                            const FeatureGrid& grid, int64_t part) {
  TF_RETURN_IF_ERROR(CheckIds(ids, count, grid));
  const RotatedMod placement(grid.row_parts);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t row = placement.LocalRow(ids[i]);
    if (static_cast<int64_t>(placement.Owner(ids[i], row)) == part) {
      rows.push_back(row);
    }
  }
  hash = HashOf(ids, count);
  return absl::OkStatus();
}

}  // namespace tfdist
