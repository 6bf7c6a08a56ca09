// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_ENTRY_BUILDER_H_
#define TFDIST_CUSTOM_OPS_CODEC_ENTRY_BUILDER_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "custom_ops/codec/bad_id.h"
#include "custom_ops/codec/id_lists.h"
#include "custom_ops/codec/id_section.h"
#include "custom_ops/codec/placement_plan.h"
#include "custom_ops/codec/rotated_mod.h"
#include "custom_ops/common/group_sort.h"
#include "custom_ops/common/radix_sort.h"

namespace tfdist {

// How a feature treats its ids.
struct FeatureRules {
  bool ignore_bad_ids = false;
  // One id per sample, strictly ascending over the samples.
  bool unique = false;
};

// Converts a feature's ids in a range of samples to entries: the unique rows of
// each sample, grouped by row part, ascending by (part, sample, row).
//
// Each id becomes one 64-bit key: part, sample and local row, from the highest
// bits down. A sort of the keys therefore groups the ids by part, orders them,
// and puts duplicates next to each other. Ids that already ascend within their
// samples only need to be grouped by part.
class EntryBuilder {
 public:
  EntryBuilder(const FeaturePlacement& placement, const FeatureRules& rules)
      : placement_(placement),
        rules_(rules),
        row_bits_(BitWidth(placement.RowLimit() - 1)),
        part_bits_(BitWidth(placement.row_parts - 1)) {}

  // The limit of samples of one builder, which the width of the keys
  // determines.
  int64_t MaxSamples() const {
    return int64_t{1} << std::min(64 - row_bits_ - part_bits_, 31);
  }

  // Builds the entries of samples [begin, end). Requires end - begin <=
  // MaxSamples().
  template <typename Tids>
  void Build(const IdLists<Tids>& lists, int64_t begin, int64_t end) {
    first_sample_ = begin;
    sample_bits_ = BitWidth(std::max<int64_t>(end - begin - 1, 0));
    const int64_t ids = lists.CountIds(begin, end);
    key_memory_.reset(new uint64_t[2 * ids]);
    value_memory_.reset(new uint32_t[2 * ids]);
    sort_.keys = key_memory_.get();
    sort_.spare_keys = sort_.keys + ids;
    if (lists.weighted) {
      sort_.values = value_memory_.get();
      sort_.spare_values = sort_.values + ids;
    }
    if (rules_.unique) CheckUnique(lists, begin, end);
    placement_.row_parts > 1 ? MakeKeys<true>(lists, begin, end)
                             : MakeKeys<false>(lists, begin, end);
    if (bad_id_.found) return;
    SortKeys(end - begin);
    lists.weighted ? CombineWeights() : CombineCounts();
  }

  const BadId& bad_id() const { return bad_id_; }

  // Whether the ids of a unique feature are unique and ascending, as promised.
  bool keeps_promise() const { return keeps_promise_; }

  // Whether the entries need float weights. They do not if all weights are
  // small counts.
  bool has_weights() const { return has_weights_; }

  // Returns the index of the first entry of `part`. `part` may be row_parts,
  // for the end of all entries.
  int64_t Begin(uint64_t part) const {
    const int shift = row_bits_ + sample_bits_;
    if (part_bits_ == 0) return part == 0 ? 0 : count_;
    return std::partition_point(
               sort_.keys, sort_.keys + count_,
               [=](uint64_t key) { return key >> shift < part; }) -
           sort_.keys;
  }

  // Appends the entries [begin, end), all of one part, to the section of this
  // part, and their samples to sample_ids. Returns the end of sample_ids.
  int32_t* Emit(int64_t begin, int64_t end, bool weighted,
                SectionWriter* section, int32_t* sample_ids) const {
    const uint64_t row_mask = (uint64_t{1} << row_bits_) - 1;
    const uint64_t sample_mask = (uint64_t{1} << sample_bits_) - 1;
    const bool weights_to_counts = sort_.values != nullptr && !weighted;
    uint64_t previous = ~uint64_t{0};
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t key = sort_.keys[i];
      const uint64_t sample = key >> row_bits_ & sample_mask;
      if (sample != previous) {
        previous = sample;
        section->BeginSample();
        *sample_ids++ = static_cast<int32_t>(first_sample_ + sample);
      }
      uint32_t value = combined_[i];
      if (weights_to_counts) value = static_cast<uint32_t>(Weight(i));
      section->AddEntry(key & row_mask, value);
    }
    return sample_ids;
  }

 private:
  // Includes the id before the range, because ids ascend over all samples.
  template <typename Tids>
  void CheckUnique(const IdLists<Tids>& lists, int64_t begin, int64_t end) {
    const auto& list = lists.lists[0];
    keeps_promise_ = lists.lists.size() == 1 &&
                     list.row_splits[begin] == begin &&
                     list.row_splits[end] == end;
    for (int64_t i = begin; keeps_promise_ && i < end; ++i) {
      keeps_promise_ = list.row_splits[i + 1] == i + 1 &&
                       (i == 0 || list.ids[i - 1] < list.ids[i]);
    }
  }

  template <bool kSplitRows, typename Tids>
  void MakeKeys(const IdLists<Tids>& lists, int64_t begin, int64_t end) {
    const RotatedMod rows(placement_.row_parts);
    const uint64_t limit = placement_.vocabulary_size;
    int64_t count = 0;
    uint64_t descents = 0;
    for (int64_t sample = begin; sample < end; ++sample) {
      const uint64_t sample_key = static_cast<uint64_t>(sample - begin)
                                  << row_bits_;
      uint64_t previous = 0;
      for (const auto& list : lists.lists) {
        const int64_t last = list.row_splits[sample + 1];
        for (int64_t i = list.row_splits[sample]; i < last; ++i) {
          const uint64_t id = static_cast<int64_t>(list.ids[i]);
          if (id >= limit) {
            if (rules_.ignore_bad_ids) continue;
            bad_id_.found = true;
            bad_id_.sample = rules_.unique ? BadId::kNoSample : sample;
            bad_id_.id = static_cast<int64_t>(id);
            return;
          }
          const uint64_t row = kSplitRows ? rows.LocalRow(id) : id;
          const uint64_t part = kSplitRows ? rows.Owner(id, row) : 0;
          // Rows that never descend over all parts do not descend within any
          // part.
          descents += row < previous;
          previous = row;
          const uint64_t key =
              sample_key | row | part << (row_bits_ + sample_bits_);
          if (lists.weighted) {
            const float weight = list.weights ? list.weights[i] : 1.0f;
            std::memcpy(sort_.values + count, &weight, sizeof(float));
          }
          sort_.keys[count++] = key;
        }
      }
    }
    count_ = count;
    sorted_ = descents == 0;
  }

  // The samples are already in order, and each often has few rows in each part.
  void SortKeys(int64_t samples) {
    const int bits = row_bits_ + sample_bits_;
    const bool in_groups =
        !sorted_ && sort_.values == nullptr && row_bits_ <= kMostGroupBits &&
        count_ >= kFewestPerGroup * samples * placement_.row_parts;
    const int low_bit = sorted_ || in_groups ? bits : 0;
    RadixSort(count_, low_bit, bits + part_bits_, &sort_);
    if (in_groups && !SortGroups(sort_.keys, count_, row_bits_)) {
      RadixSort(count_, 0, bits + part_bits_, &sort_);
    }
  }

  // Replaces equal keys by one entry and their count. No branch depends on the
  // data, because the positions of duplicates are unpredictable.
  void CombineCounts() {
    combined_ = value_memory_.get();
    uint64_t* keys = sort_.keys;
    int64_t last = -1;
    uint64_t previous = ~uint64_t{0};
    uint32_t occurrences = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const uint64_t key = keys[i];
      const bool first = i == 0 || key != previous;
      last += first;
      occurrences = first ? 1 : occurrences + 1;
      keys[last] = previous = key;
      combined_[last] = occurrences;
    }
    count_ = last + 1;
  }

  // Like CombineCounts, with float weights, summed in the order of the input.
  void CombineWeights() {
    combined_ = sort_.values;
    uint64_t* keys = sort_.keys;
    int64_t last = -1;
    for (int64_t i = 0; i < count_; ++i) {
      float weight;
      std::memcpy(&weight, sort_.values + i, sizeof(float));
      if (last >= 0 && keys[last] == keys[i]) {
        float sum;
        std::memcpy(&sum, combined_ + last, sizeof(float));
        weight += sum;
      } else {
        keys[++last] = keys[i];
      }
      std::memcpy(combined_ + last, &weight, sizeof(float));
    }
    count_ = last + 1;
    for (int64_t i = 0; i < count_; ++i) has_weights_ |= !IsCount(Weight(i));
  }

  float Weight(int64_t i) const {
    float weight;
    std::memcpy(&weight, combined_ + i, sizeof(float));
    return weight;
  }

  // Whether a weight can be sent as a count without loss.
  static bool IsCount(float weight) {
    constexpr float kMostOccurrences = 1 << 24;
    return weight >= 1 && weight <= kMostOccurrences &&
           weight == static_cast<float>(static_cast<uint32_t>(weight));
  }

  const FeaturePlacement& placement_;
  const FeatureRules rules_;
  const int row_bits_;
  const int part_bits_;
  int sample_bits_ = 0;
  int64_t first_sample_ = 0;
  int64_t count_ = 0;
  bool sorted_ = false;
  bool keeps_promise_ = true;
  bool has_weights_ = false;
  BadId bad_id_;
  std::unique_ptr<uint64_t[]> key_memory_;
  std::unique_ptr<uint32_t[]> value_memory_;
  SortBuffers sort_{};
  uint32_t* combined_ = nullptr;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_ENTRY_BUILDER_H_
