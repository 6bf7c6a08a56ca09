// SPDX-License-Identifier: Apache-2.0
//
// The part of a section that one thread of a CPU or GPU reads. The data came
// over the network: any bytes are either decoded within bounds or refused.
#ifndef TFDIST_CUSTOM_OPS_CODEC_ID_BLOCK_H_
#define TFDIST_CUSTOM_OPS_CODEC_ID_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "custom_ops/codec/bit_stream.h"
#include "custom_ops/common/target_clones.h"

namespace tfdist {

// The codes of the lists of a section.
struct SectionCodes {
  RiceCode counts;
  RiceCode repeat_counts;
  int gaps = 0;         // parameters of the codes that cannot be constant
  int repeat_gaps = 0;  // the first one of a block counts from its first entry
  bool running = false;
  bool weighted = false;
};

// Consecutive samples of a section. The lists of a block are stored one after
// another, padded to a byte, and do not depend on other blocks.
struct IdBlock {
  int64_t section;  // index among the sections that are decoded in one call
  size_t at;        // offset of its first byte
  size_t bytes;
  size_t weights_at;     // offset of its weights, if the section is weighted
  int64_t first_sample;  // among the samples that are decoded
  int64_t samples;
  int64_t first_entry;
  int64_t entries;
  int64_t repeats;
  // The row that the gaps of a running section continue from.
  uint64_t next_row;
  uint64_t end_row;  // the row that they must end at; 0 if unknown
};

// Why a block is refused. Reason() in id_section.h returns the text.
enum class IdError : uint8_t {
  kNone,
  kCountsExceed,
  kCountsLack,
  kOutOfRange,
  kRowsContradict,
  kRepeatPastEnd,
  kTruncated,
  kWrongSize,
};

// The outputs for the entries of all blocks.
struct DecodedIds {
  int64_t* row_splits;  // a block writes [first_sample + 1 .. + samples]
  int64_t* rows;        // [first_entry .. + entries], like the weights
  float* weights;       // nullptr if no section has weights or repeats
};

TFDIST_INLINE IdError ReadCounts(const SectionCodes& codes,
                                 const IdBlock& block, BitReader* bits,
                                 int64_t* row_splits) {
  const uint64_t entries = block.entries;
  uint64_t end = 0;
  for (int64_t s = 0; s < block.samples; ++s) {
    const uint64_t count = codes.counts.Next(bits);
    if (count == 0 || count > entries - end) return IdError::kCountsExceed;
    end += count;
    row_splits[s] = block.first_entry + static_cast<int64_t>(end);
  }
  return end == entries ? IdError::kNone : IdError::kCountsLack;
}

// One loop for all samples, so that the threads of a warp do not diverge.
TFDIST_INLINE IdError ReadRows(const SectionCodes& codes, const IdBlock& block,
                               uint64_t row_limit, BitReader* bits,
                               const int64_t* row_splits, int64_t* rows) {
  const bool running = codes.running;
  const int64_t entries = block.entries;
  const int64_t first_entry = block.first_entry;
  const int k = codes.gaps;
  uint64_t next_row = running ? block.next_row : 0;
  int64_t sample_end = row_splits[0] - first_entry;
  for (int64_t entry = 0; entry < entries; ++entry) {
    if (entry == sample_end) {
      sample_end = *++row_splits - first_entry;
      if (!running) next_row = 0;
    }
    const uint64_t gap = bits->GetRice(k);
    const uint64_t row = next_row + gap;
    if (gap >= row_limit || row >= row_limit) return IdError::kOutOfRange;
    rows[entry] = static_cast<int64_t>(row);
    next_row = row + 1;
  }
  const bool said = running && block.end_row != 0;
  return !said || next_row == block.end_row ? IdError::kNone
                                            : IdError::kRowsContradict;
}

TFDIST_INLINE IdError ReadRepeats(const SectionCodes& codes,
                                  const IdBlock& block, BitReader* bits,
                                  float* weights) {
  const uint64_t entries = block.entries;
  uint64_t next = 0;
  for (int64_t i = 0; i < block.repeats; ++i) {
    const uint64_t gap = bits->GetRice(codes.repeat_gaps);
    if (next >= entries || gap >= entries - next) {
      return IdError::kRepeatPastEnd;
    }
    weights[next + gap] = 0;  // marks the entry, whose count follows
    next += gap + 1;
  }
  int64_t entry = 0;
  for (int64_t i = 0; i < block.repeats; ++i) {
    while (weights[entry] != 0) ++entry;
    const uint64_t count = codes.repeat_counts.Next(bits);
    weights[entry] = count == 0 ? 1.0f : static_cast<float>(count);
  }
  return IdError::kNone;
}

// Decodes a block of `data`, with rows below `row_limit`. The caller has
// checked that the bytes and weights of the block are within the data.
TFDIST_INLINE IdError ReadBlock(const SectionCodes& codes, const IdBlock& block,
                                uint64_t row_limit, const uint8_t* data,
                                const DecodedIds& to) {
  BitReader bits(data + block.at, block.bytes);
  int64_t* row_splits = to.row_splits + block.first_sample + 1;
  IdError error = ReadCounts(codes, block, &bits, row_splits);
  if (error != IdError::kNone) return error;
  error = ReadRows(codes, block, row_limit, &bits, row_splits,
                   to.rows + block.first_entry);
  if (error != IdError::kNone) return error;
  if (to.weights != nullptr) {
    float* weights = to.weights + block.first_entry;
    for (int64_t i = 0; i < block.entries; ++i) weights[i] = 1.0f;
    error = ReadRepeats(codes, block, &bits, weights);
    if (error != IdError::kNone) return error;
    if (codes.weighted) {
      std::memcpy(weights, data + block.weights_at,
                  block.entries * sizeof(float));
    }
  }
  if (!bits.ok()) return IdError::kTruncated;
  return bits.bytes_read() == block.bytes ? IdError::kNone
                                          : IdError::kWrongSize;
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_ID_BLOCK_H_
