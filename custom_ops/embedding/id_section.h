// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_ID_SECTION_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_ID_SECTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "custom_ops/embedding/bit_stream.h"

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

// The first byte of a section.
enum SectionFlags : uint8_t {
  kWeighted = 0x01,
  kRepeats = 0x02,
  kSingle = 0x04,  // one entry in every sample
  kRunning = 0x08,
  kAllFlags = 0x0F,
};

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
  // entries.
  size_t Finish(bool weighted);

  // Writes exactly that many bytes.
  void Write(uint8_t* out) const;

 private:
  void FindRepeats();
  void WriteHeader();
  bool single() const { return samples_ == entries_; }

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
  const char* ReadEntries(uint64_t row_limit, int64_t first_entry,
                          int64_t* row_splits, int64_t* rows,
                          float* weights) const;

  int64_t samples() const { return samples_; }
  int64_t entries() const { return entries_; }
  bool needs_weights() const { return weighted_ || repeats_ > 0; }

 private:
  const char* ReadCounts(BitReader* bits, int64_t first_entry,
                         int64_t* row_splits) const;
  const char* ReadRows(BitReader* bits, uint64_t row_limit, int64_t first_entry,
                       const int64_t* row_splits, int64_t* rows) const;
  const char* ReadRepeats(BitReader* bits, float* weights) const;

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

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_ID_SECTION_H_
