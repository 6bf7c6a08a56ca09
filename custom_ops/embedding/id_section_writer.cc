// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "header_bytes.h"
#include "id_section.h"

namespace tfdist {

void SectionWriter::Reserve(size_t capacity, bool running,
                            const HotLine& line) {
  running_ = running;
  line_ = line;
  if (line.hot > 0) {
    start_octaves_.reset(new uint8_t[capacity]);
    octaves_.reset(new uint8_t[capacity]);
  }
  gaps_.reset(new uint64_t[capacity]);
  values_.reset(new uint32_t[capacity]);
  counts_.reset(new uint32_t[capacity]);
}

// Most entries occur once: listing the others, by their distance from each
// other, is cheaper than one bit for every entry. Those come unpredictably, so
// no branch depends on them.
void SectionWriter::FindRepeats() {
  size_t repeats = 0;
  for (size_t i = 0; i < entries_; ++i) repeats += values_[i] != 1;
  if (repeats == 0) return;
  repeat_gaps_.reset(new uint32_t[entries_]);
  repeat_counts_.reset(new uint32_t[entries_]);
  const bool hot = line_.hot > 0;
  if (hot) SplitHead();
  uint32_t next = 0;
  for (size_t i = 0; i < entries_; ++i) {
    const bool listed = values_[i] != 1 && !(hot && octaves_[i] < kHeadOctaves);
    repeat_gaps_[repeats_] = static_cast<uint32_t>(i) - next;
    repeat_counts_[repeats_] = values_[i];
    repeats_ += listed;
    next = listed ? static_cast<uint32_t>(i) + 1 : next;
  }
}

// Copies what is to be said of the first positions.
void SectionWriter::SplitHead() {
  has_head_ = true;
  head_counts_.reset(new uint32_t[entries_]);
  head_octaves_.reset(new uint8_t[entries_]);
  for (size_t i = 0; i < entries_; ++i) {
    head_counts_[head_] = values_[i];
    head_octaves_[head_] = octaves_[i];
    head_ += octaves_[i] < kHeadOctaves;
  }
}

// Returns the bits of the positions and of how often the first ones occur.
uint64_t SectionWriter::ChooseHotCodes() {
  uint64_t bits = 0;
  if (single()) {
    const int rest = line_.octaves() - 1;
    for (size_t i = 0; i < entries_; ++i) {
      bits += 1 + (octaves_[i] == rest ? line_.row_bits()
                                       : line_.octave_bits() + octaves_[i]);
    }
  } else {
    hot_gap_codes_.Choose(gaps_.get(), 0, start_octaves_.get(), entries_,
                          line_.octaves());
    bits += hot_gap_codes_.bits();
  }
  if (has_head_) {
    head_codes_.Choose(head_counts_.get(), 1, head_octaves_.get(), head_,
                       kHeadOctaves);
    bits += head_codes_.bits();
  }
  return bits;
}

void SectionWriter::WriteHeader() {
  const bool hot = line_.hot > 0;
  uint8_t* out = header_;
  *out++ = (weighted_ ? kWeighted : 0) | (repeats_ > 0 ? kRepeats : 0) |
           (single() ? kSingle : 0) | (running_ ? kRunning : 0) |
           (hot ? kHot : 0) | (has_head_ ? kHead : 0);
  if (hot) out = PutFixed(line_.hash, out);
  out = PutVarint(entries_, out);
  if (!single()) {
    out = PutVarint(samples_, out);
    out = PutCode(count_code_, out);
  }
  if (!hot) *out++ = static_cast<uint8_t>(gap_code_.k);
  if (repeats_ > 0) {
    out = PutVarint(repeats_, out);
    *out++ = static_cast<uint8_t>(repeat_gap_code_.k);
    out = PutCode(repeat_count_code_, out);
  }
  header_size_ = out - header_;
}

size_t SectionWriter::Finish(bool weighted) {
  if (entries_ == 0) return 0;
  weighted_ = weighted;
  if (!weighted_) FindRepeats();
  count_code_ = ChooseRiceWithBase(counts_.get(), samples_);
  uint64_t bits = 0;
  if (line_.hot > 0) {
    bits = ChooseHotCodes();
  } else {
    gap_code_ = ChooseRice(gaps_.get(), entries_, 0);
    bits = gap_code_.bits;
  }
  repeat_gap_code_ = ChooseRice(repeat_gaps_.get(), repeats_, 0);
  repeat_count_code_ = ChooseRiceWithBase(repeat_counts_.get(), repeats_);
  WriteHeader();
  bits += count_code_.bits + repeat_gap_code_.bits + repeat_count_code_.bits;
  return header_size_ + (bits + 7) / 8 +
         (weighted_ ? entries_ * sizeof(float) : 0);
}

void SectionWriter::WriteHot(BitWriter* bits) const {
  if (single()) {
    const int rest = line_.octaves() - 1;
    for (size_t i = 0; i < entries_; ++i) {
      const int octave = octaves_[i];
      const bool hot = octave != rest;
      bits->Put(hot, 1);
      if (hot) {
        bits->Put(octave, line_.octave_bits());
        bits->Put(gaps_[i] + 1 - (uint64_t{1} << octave), octave);
      } else {
        bits->Put(gaps_[i] - line_.hot, line_.row_bits());
      }
    }
  } else {
    hot_gap_codes_.PutParameters(bits);
    for (size_t i = 0; i < entries_; ++i) {
      bits->PutRice(gaps_[i], hot_gap_codes_.k(start_octaves_[i]));
    }
  }
  if (!has_head_) return;
  head_codes_.PutParameters(bits);
  for (size_t i = 0; i < head_; ++i) {
    bits->PutRice(head_counts_[i] - 1, head_codes_.k(head_octaves_[i]));
  }
}

void SectionWriter::Write(uint8_t* out) const {
  std::memcpy(out, header_, header_size_);
  BitWriter bits(out + header_size_);
  PutRiceList(counts_.get(), samples_, count_code_, &bits);
  if (line_.hot > 0) {
    WriteHot(&bits);
  } else {
    PutRiceList(gaps_.get(), entries_, gap_code_, &bits);
  }
  PutRiceList(repeat_gaps_.get(), repeats_, repeat_gap_code_, &bits);
  PutRiceList(repeat_counts_.get(), repeats_, repeat_count_code_, &bits);
  out = bits.Finish();
  if (weighted_) std::memcpy(out, values_.get(), entries_ * sizeof(float));
}

}  // namespace tfdist
