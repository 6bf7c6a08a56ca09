// SPDX-License-Identifier: Apache-2.0
//
// The part of a section that one thread reads, of a CPU or a GPU. What it reads
// came over the network: any bytes are either decoded within bounds or refused.
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_ID_BLOCK_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_ID_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "custom_ops/common/target_clones.h"
#include "custom_ops/embedding/bit_stream.h"

namespace tfdist {

// How the lists of a section are coded.
struct SectionCodes {
  RiceCode counts;
  RiceCode repeat_counts;
  int gaps = 0;         // parameters of the codes that cannot be constant
  int repeat_gaps = 0;  // a block's first repeat: from its first entry
  bool running = false;
  bool weighted = false;
};

// Consecutive samples of a section. Its lists, one behind the other and padded
// to a byte, depend on no other block.
struct IdBlock {
  int64_t section;  // of those that are read together
  size_t at;        // its first byte
  size_t bytes;
  size_t weights_at;     // of its weights, if the section is weighted
  int64_t first_sample;  // within what is decoded
  int64_t samples;
  int64_t first_entry;
  int64_t entries;
  int64_t repeats;
  uint64_t next_row;  // where the gaps of a running section go on
  uint64_t end_row;   // and where they must end; 0 if that is not said
};

// Why a block is refused; Reason() in id_section.h has the words.
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

// Where the entries of all blocks go.
struct DecodedIds {
  int64_t* row_splits;  // a block writes [first_sample + 1 .. + samples]
  int64_t* rows;        // [first_entry .. + entries], as the weights
  float* weights;       // nullptr: no section has weights or repeats
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

// One loop for all samples: threads of a warp stay together.
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
    weights[next + gap] = 0;  // marks the entry, its count follows
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

// Decodes a block of `data`, rows below `row_limit`. Whoever made the block has
// seen that its bytes and weights are there.
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

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_ID_BLOCK_H_
