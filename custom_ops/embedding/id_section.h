// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_ID_SECTION_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_ID_SECTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "custom_ops/embedding/bit_stream.h"
#include "custom_ops/embedding/header_bytes.h"
#include "custom_ops/embedding/id_block.h"

namespace tfdist {

// The ids of one feature that one part of its table's rows serves:
//
//   header    flags, sizes, code parameters
//   counts    Rice codes: unique rows of every sample present
//   gaps      Rice codes: ascending rows of a sample, each as the distance from
//             the one before; about log2(mean gap) + 1.5 bits
//   repeats   Rice codes: which entries occur more than once, and how often
//   weights   float32 per entry, only when some weight is not 1
//
// An entry is one unique row of one sample. Which of the sender's samples are
// present is not sent: the sender scatters the results itself. In a "running"
// section every sample has one row and these ascend from sample to sample:
// there are no counts, and gaps run through.
//
// For a GPU a section is cut into blocks of as many samples, of about
// kBlockEntries entries, which as many threads read side by side. Their sizes
// stand before them as Rice codes, and each has its own part of the lists:
//
//   header    also: samples of a block, code parameters of the table
//   table     of every block: bytes, entries unless single, repeats if there
//             are any, rows from its first to its last if running
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

// A thread of a GPU reads about as many entries.
constexpr size_t kBlockEntries = 128;

// Why a block is refused; nullptr for none.
const char* Reason(IdError error);

// Collects the entries of one section, in order, then writes it.
class SectionWriter {
 public:
  // Makes room for `capacity` entries.
  void Reserve(size_t capacity, bool running);

  // Opens the next sample; its first entry must follow.
  void BeginSample() {
    counts_[samples_++] = 0;
    if (!running_) next_row_ = 0;
  }

  // Adds the next entry, rows ascending. `value` is the number of occurrences,
  // or the bits of a float weight if Finish() is told so.
  void AddEntry(uint64_t row, uint32_t value) {
    gaps_[entries_] = row - next_row_;
    values_[entries_++] = value;
    ++counts_[samples_ - 1];
    next_row_ = row + 1;
  }

  // Ends the entries: chooses the codes. Returns the size in bytes, 0 without
  // entries. `in_blocks`: for a GPU, where they are enough for several.
  size_t Finish(bool weighted, bool in_blocks);

  // Writes exactly that many bytes.
  void Write(uint8_t* out) const;

 private:
  struct Block {
    size_t first_sample;
    size_t first_entry;
    size_t first_repeat;
  };
  // What is said of every block.
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
  std::vector<Block> blocks_;  // then where the last one ends
  Table table_;
  uint8_t header_[128];
  size_t header_size_ = 0;
};

// Reads the header of a section and its table. What it reads came over the
// network: any bytes are either placed within bounds or refused with a reason.
class SectionReader {
 public:
  // Returns nullptr, or why the section is malformed. Sizes are bounded by the
  // section's size before anyone allocates by them.
  const char* ReadHeader(const uint8_t* data, size_t size);

  // What is to be decoded, in order; places and samples are those within the
  // section. ReadBlock() does it.
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

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_ID_SECTION_H_
