// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_EMBEDDING_ID_CODEC_H_
#define TFDIST_EMBEDDING_ID_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "bit_stream.h"

namespace tfdist {

// The message that carries ids from one rank to the owner of their rows.
//
//   header    version and flags, rank, samples, sizes, code parameters
//   counts    Rice codes: distinct rows of every sample present
//   gaps      Rice codes: ascending rows of a sample, each as the distance from
//             the one before; about log2(mean gap) + 1.5 bits
//   repeats   Rice codes: which entries occur more than once, and how often
//   weights   float32 per entry, only when some weight is not 1
//
// An entry is one distinct row of one sample. Which of the sender's samples are
// present is not sent: the sender scatters the results itself.
//
// A sender that met a bad id sends an error record instead of ids, so that the
// step fails on all ranks with one text rather than on one of them.

// The first id that the `out_of_range="error"` policy refuses.
struct BadId {
  bool found = false;
  int64_t sample = 0;
  int64_t id = 0;
};

// Collects the entries of one message, in order, then writes it.
class MessageWriter {
 public:
  // Makes room for `capacity` entries.
  explicit MessageWriter(size_t capacity);

  // Opens the next sample; its first entry must follow.
  void BeginSample() {
    counts_[samples_++] = 0;
    next_row_ = 0;
  }

  // Adds the next entry, rows ascending. `value` is the number of occurrences,
  // or the bits of a float weight if Finish() is told so.
  void AddEntry(uint64_t row, uint32_t value) {
    gaps_[entries_] = row - next_row_;
    values_[entries_++] = value;
    ++counts_[samples_ - 1];
    next_row_ = row + 1;
  }

  // Ends the entries: chooses the codes. Returns the size in bytes.
  size_t Finish(int rank, float samples_weight, bool weighted,
                const BadId& bad_id);

  // Writes exactly that many bytes.
  void Write(uint8_t* out) const;

  size_t samples() const { return samples_; }

 private:
  void FindRepeats();

  size_t samples_ = 0;
  size_t entries_ = 0;
  size_t repeats_ = 0;
  uint64_t next_row_ = 0;
  std::unique_ptr<uint64_t[]> gaps_;
  std::unique_ptr<uint32_t[]> values_;
  std::unique_ptr<uint32_t[]> counts_;
  std::unique_ptr<uint32_t[]> repeat_gaps_;
  std::unique_ptr<uint32_t[]> repeat_counts_;
  bool weighted_ = false;
  RiceCode count_code_;
  RiceCode gap_code_;
  RiceCode repeat_gap_code_;
  RiceCode repeat_count_code_;
  uint8_t header_[96];
  size_t header_size_ = 0;
};

// Reads one message. What it reads came over the network: any bytes are either
// decoded within bounds or refused with a reason.
class MessageReader {
 public:
  // Reads the header. Returns nullptr, or why the message is malformed. Sizes
  // are bounded by the message's size before anyone allocates by them.
  const char* ReadHeader(const uint8_t* data, size_t size);

  // Decodes the entries: row_splits[1 .. samples()] shifted by `first_entry`,
  // rows[entries()] below `row_limit`, and weights[entries()] unless nullptr.
  const char* ReadEntries(uint64_t row_limit, int64_t first_entry,
                          int64_t* row_splits, int64_t* rows,
                          float* weights) const;

  int64_t rank() const { return rank_; }
  float samples_weight() const { return samples_weight_; }
  int64_t samples() const { return samples_; }
  int64_t entries() const { return entries_; }
  bool needs_weights() const { return weighted_ || repeats_ > 0; }
  const BadId& bad_id() const { return bad_id_; }

 private:
  const char* ReadCounts(BitReader* bits, int64_t first_entry,
                         int64_t* row_splits) const;
  const char* ReadRepeats(BitReader* bits, float* weights) const;

  int64_t rank_ = 0;
  float samples_weight_ = 0;
  int64_t samples_ = 0;
  int64_t entries_ = 0;
  int64_t repeats_ = 0;
  bool weighted_ = false;
  BadId bad_id_;
  RiceCode count_code_;
  RiceCode gap_code_;
  RiceCode repeat_gap_code_;
  RiceCode repeat_count_code_;
  const uint8_t* body_ = nullptr;
  size_t body_size_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_EMBEDDING_ID_CODEC_H_
