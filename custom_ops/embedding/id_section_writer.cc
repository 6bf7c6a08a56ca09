// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "custom_ops/embedding/header_bytes.h"
#include "custom_ops/embedding/id_section.h"

namespace tfdist {

void SectionWriter::Reserve(size_t capacity, bool running) {
  running_ = running;
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
  uint32_t next = 0;
  for (size_t i = 0; i < entries_; ++i) {
    const bool listed = values_[i] != 1;
    repeat_gaps_[repeats_] = static_cast<uint32_t>(i) - next;
    repeat_counts_[repeats_] = values_[i];
    repeats_ += listed;
    next = listed ? static_cast<uint32_t>(i) + 1 : next;
  }
}

void SectionWriter::WriteHeader() {
  uint8_t* out = header_;
  *out++ = (weighted_ ? kWeighted : 0) | (repeats_ > 0 ? kRepeats : 0) |
           (single() ? kSingle : 0) | (running_ ? kRunning : 0);
  out = PutVarint(entries_, out);
  if (!single()) {
    out = PutVarint(samples_, out);
    out = PutCode(count_code_, out);
  }
  *out++ = static_cast<uint8_t>(gap_code_.k);
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
  gap_code_ = ChooseRice(gaps_.get(), entries_, 0);
  repeat_gap_code_ = ChooseRice(repeat_gaps_.get(), repeats_, 0);
  repeat_count_code_ = ChooseRiceWithBase(repeat_counts_.get(), repeats_);
  WriteHeader();
  const uint64_t bits = count_code_.bits + gap_code_.bits +
                        repeat_gap_code_.bits + repeat_count_code_.bits;
  return header_size_ + (bits + 7) / 8 +
         (weighted_ ? entries_ * sizeof(float) : 0);
}

void SectionWriter::Write(uint8_t* out) const {
  std::memcpy(out, header_, header_size_);
  BitWriter bits(out + header_size_);
  PutRiceList(counts_.get(), samples_, count_code_, &bits);
  PutRiceList(gaps_.get(), entries_, gap_code_, &bits);
  PutRiceList(repeat_gaps_.get(), repeats_, repeat_gap_code_, &bits);
  PutRiceList(repeat_counts_.get(), repeats_, repeat_count_code_, &bits);
  out = bits.Finish();
  if (weighted_) std::memcpy(out, values_.get(), entries_ * sizeof(float));
}

}  // namespace tfdist
