// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_EMBEDDING_ID_SECTION_H_
#define TFDIST_EMBEDDING_ID_SECTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "bit_stream.h"
#include "hot_ids.h"
#include "octave_codes.h"

namespace tfdist {

// The ids of one feature that one part of its table's rows serves:
//
//   header    flags, sizes, code parameters
//   counts    Rice codes: distinct rows of every sample present
//   gaps      Rice codes: ascending rows of a sample, each as the distance from
//             the one before; about log2(mean gap) + 1.5 bits
//   repeats   Rice codes: which entries occur more than once, and how often
//   weights   float32 per entry, only when some weight is not 1
//
// An entry is one distinct row of one sample. Which of the sender's samples are
// present is not sent: the sender scatters the results itself. In a "running"
// section every sample has one row and these ascend from sample to sample:
// there are no counts, and gaps run through.
//
// A "hot" section has positions on the line of hot_ids.h in place of rows. The
// code of a gap is that of its start's octave, and the first positions, which
// are in nearly every sample and often repeated, have a list of how often they
// occur. Where every sample has one entry, gaps would all start at 0: a
// position is its octave in a fixed number of bits, then its bits below the
// first.

// The first byte of a section.
enum SectionFlags : uint8_t {
  kWeighted = 0x01,
  kRepeats = 0x02,
  kSingle = 0x04,  // one entry in every sample
  kRunning = 0x08,
  kHot = 0x10,
  kHead = 0x20,  // a list of how often the first positions occur
  kAllFlags = 0x3F,
};

// Octaves whose positions are in that list.
constexpr int kHeadOctaves = 5;

// What the sender knows of the line of a row part; no hot ids, no line.
struct HotLine {
  int64_t hot = 0;
  int64_t rows = 0;
  uint16_t hash = 0;

  // Of the starts of gaps; the last is that of positions that are not hot.
  int octaves() const { return BitWidth(hot) + 1; }
  int OctaveOf(uint64_t position) const {
    return position < static_cast<uint64_t>(hot) ? Octave(position)
                                                 : octaves() - 1;
  }
  // Bits that a position's octave takes, and a row that is not hot.
  int octave_bits() const { return BitWidth(BitWidth(hot) - 1); }
  int row_bits() const { return BitWidth(rows - 1); }
};

// Collects the entries of one section, in order, then writes it.
class SectionWriter {
 public:
  // Makes room for `capacity` entries. With hot ids, their rows are positions.
  void Reserve(size_t capacity, bool running, const HotLine& line);

  // Opens the next sample; its first entry must follow.
  void BeginSample() {
    counts_[samples_++] = 0;
    if (!running_) next_row_ = 0;
  }

  // Adds the next entry, rows ascending. `value` is the number of occurrences,
  // or the bits of a float weight if Finish() is told so.
  void AddEntry(uint64_t row, uint32_t value) {
    gaps_[entries_] = row - next_row_;
    if (line_.hot > 0) {
      start_octaves_[entries_] = line_.OctaveOf(next_row_);
      octaves_[entries_] = line_.OctaveOf(row);
    }
    values_[entries_++] = value;
    ++counts_[samples_ - 1];
    next_row_ = row + 1;
  }

  // Ends the entries: chooses the codes. Returns the size in bytes, 0 without
  // entries.
  size_t Finish(bool weighted);

  // Writes exactly that many bytes.
  void Write(uint8_t* out) const;

 private:
  void FindRepeats();
  void SplitHead();
  uint64_t ChooseHotCodes();
  void WriteHeader();
  void WriteHot(BitWriter* bits) const;
  bool single() const { return samples_ == entries_; }
  HotLine line_;
  bool has_head_ = false;
  std::unique_ptr<uint8_t[]> start_octaves_;
  std::unique_ptr<uint8_t[]> octaves_;
  size_t head_ = 0;
  std::unique_ptr<uint32_t[]> head_counts_;
  std::unique_ptr<uint8_t[]> head_octaves_;
  OctaveCodes hot_gap_codes_;
  OctaveCodes head_codes_;
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
  uint8_t header_[64];
  size_t header_size_ = 0;
};

// Reads one section. What it reads came over the network: any bytes are either
// decoded within bounds or refused with a reason.
class SectionReader {
 public:
  // Reads the header. Returns nullptr, or why the section is malformed. Sizes
  // are bounded by the section's size before anyone allocates by them.
  const char* ReadHeader(const uint8_t* data, size_t size);

  // Decodes the entries: row_splits[1 .. samples()] shifted by `first_entry`,
  // rows[entries()] below `row_limit`, and weights[entries()] unless nullptr.
  // `hot` is what this rank knows of the hot ids, nullptr for none.
  const char* ReadEntries(uint64_t row_limit, const HotRows* hot,
                          int64_t first_entry, int64_t* row_splits,
                          int64_t* rows, float* weights) const;

  int64_t samples() const { return samples_; }
  int64_t entries() const { return entries_; }
  bool needs_weights() const { return weighted_ || repeats_ > 0 || has_head_; }

 private:
  const char* ReadCounts(BitReader* bits, int64_t first_entry,
                         int64_t* row_splits) const;
  const char* ReadRows(BitReader* bits, uint64_t row_limit, int64_t first_entry,
                       const int64_t* row_splits, int64_t* rows) const;
  const char* ReadPositions(BitReader* bits, const HotLine& line,
                            int64_t first_entry, const int64_t* row_splits,
                            int64_t* positions) const;
  const char* ReadSingles(BitReader* bits, const HotLine& line,
                          int64_t* positions) const;
  const char* ReadHead(BitReader* bits, const HotLine& line,
                       const int64_t* positions, float* weights) const;
  const char* ReadRepeats(BitReader* bits, float* weights) const;

  bool hot_ = false;
  uint16_t hot_hash_ = 0;
  bool has_head_ = false;
  bool running_ = false;
  bool weighted_ = false;
  int64_t samples_ = 0;
  int64_t entries_ = 0;
  int64_t repeats_ = 0;
  RiceCode count_code_;
  RiceCode gap_code_;
  RiceCode repeat_gap_code_;
  RiceCode repeat_count_code_;
  const uint8_t* body_ = nullptr;
  size_t body_size_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_EMBEDDING_ID_SECTION_H_
