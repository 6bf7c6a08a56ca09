// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_ID_SECTION_H_
#define TFDIST_CUSTOM_OPS_CODEC_ID_SECTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "custom_ops/codec/bit_stream.h"
#include "custom_ops/codec/header_bytes.h"
#include "custom_ops/codec/id_block.h"

namespace tfdist {

// A section: the ids of one feature for one row part of its table.
//
//   header    flags, sizes, code parameters
//   counts    Rice codes: number of unique rows of each sample in the section
//   gaps      Rice codes: the ascending rows of a sample, each as the distance
//             from the one before; about log2(mean gap) + 1.5 bits
//   repeats   Rice codes: which entries occur more than once, and how often
//   weights   float32 per entry, only if some weight is not 1
//
// An entry is one unique row of one sample. A section does not contain the
// numbers of its samples, because the sender scatters the results itself. In a
// "running" section, every sample has one row, and these rows ascend from
// sample to sample. There are no counts, and the gaps continue from one sample
// to the next.
//
// For a GPU, a section is divided into blocks with the same number of samples,
// of about kBlockEntries entries each, which threads decode in parallel. Each
// block has its own part of the lists. A table of the block sizes precedes the
// blocks:
//
//   header    also: samples of a block, code parameters of the table
//   table     Rice codes for each block: bytes, entries unless single, repeats
//             if there are any, rows from its first to its last if running
//   blocks    each: counts, gaps and repeats, padded to a byte
//   weights   as above

// The first byte of a section.
enum SectionFlags : uint8_t {
  kWeighted = 0x01,
  kRepeats = 0x02,
  kSingle = 0x04,  // one entry in every sample
  kRunning = 0x08,
  kBlocks = 0x10,
  kAllFlags = 0x1F,
};

// The approximate number of entries that one GPU thread decodes.
constexpr size_t kBlockEntries = 128;

// Returns the text of an error; nullptr for kNone.
const char* Reason(IdError error);

// Collects the entries of one section in order, then writes the section.
class SectionWriter {
 public:
  // Allocates memory for `capacity` entries.
  void Reserve(size_t capacity, bool running);

  // Starts the next sample. Its first entry must follow.
  void BeginSample() {
    counts_[samples_++] = 0;
    if (!running_) next_row_ = 0;
  }

  // Adds the next entry. Rows must ascend within a sample. `value` is the
  // number of occurrences, or the bits of a float weight if Finish() is called
  // with `weighted`.
  void AddEntry(uint64_t row, uint32_t value) {
    gaps_[entries_] = row - next_row_;
    values_[entries_++] = value;
    ++counts_[samples_ - 1];
    next_row_ = row + 1;
  }

  // Ends the entries and chooses the codes. Returns the size of the section in
  // bytes, 0 if it has no entries. `in_blocks`: divide the section into blocks
  // for a GPU, if it has enough entries.
  size_t Finish(bool weighted, bool in_blocks);

  // Writes exactly as many bytes as Finish() returned.
  void Write(uint8_t* out) const;

 private:
  struct Block {
    size_t first_sample;
    size_t first_entry;
    size_t first_repeat;
  };
  // The values of the block table.
  struct Table {
    size_t samples = 0;  // of a block
    std::vector<uint64_t> bytes, entries, repeats, rows;
    RiceCode bytes_code, entries_code, repeats_code, rows_code;
    size_t bits = 0;
  };

  void CutBlocks(bool in_blocks);
  void FindRepeats();
  void FillTable();
  void WriteHeader();
  void WriteBlock(const Block& block, const Block& end, BitWriter* bits) const;
  bool single() const { return samples_ == entries_; }
  bool in_blocks() const { return blocks_.size() > 2; }

  bool running_ = false;
  bool weighted_ = false;
  size_t samples_ = 0;
  size_t entries_ = 0;
  size_t repeats_ = 0;
  uint64_t next_row_ = 0;
  std::unique_ptr<uint64_t[]> gaps_;
  std::unique_ptr<uint32_t[]> values_;
  std::unique_ptr<uint32_t[]> counts_;
  std::unique_ptr<uint32_t[]> repeat_gaps_;
  std::unique_ptr<uint32_t[]> repeat_counts_;
  RiceCode count_code_;
  RiceCode gap_code_;
  RiceCode repeat_gap_code_;
  RiceCode repeat_count_code_;
  std::vector<Block> blocks_;  // the last element marks the end
  Table table_;
  uint8_t header_[128];
  size_t header_size_ = 0;
};

// Reads the header and the block table of a section. The data came over the
// network: any bytes are either accepted within bounds or refused with a
// reason.
class SectionReader {
 public:
  // Returns nullptr, or why the section is malformed. The sizes it reads are
  // limited by the size of the section, so they are safe for allocations.
  const char* ReadHeader(const uint8_t* data, size_t size);

  // The blocks to decode with ReadBlock(), in order. Offsets and samples are
  // relative to the section.
  const std::vector<IdBlock>& blocks() const { return blocks_; }
  const SectionCodes& codes() const { return codes_; }

  int64_t samples() const { return samples_; }
  int64_t entries() const { return entries_; }
  bool needs_weights() const { return codes_.weighted || repeats_ > 0; }

 private:
  const char* ReadBlockTable(uint8_t flags, HeaderReader* header);
  const char* PlaceBlocks(bool has_table, size_t at, size_t left);

  int64_t samples_ = 0;
  int64_t entries_ = 0;
  int64_t repeats_ = 0;
  SectionCodes codes_;
  std::vector<IdBlock> blocks_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_ID_SECTION_H_
