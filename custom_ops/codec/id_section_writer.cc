// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <numeric>

#include "custom_ops/codec/header_bytes.h"
#include "custom_ops/codec/id_section.h"

namespace tfdist {

void SectionWriter::Reserve(size_t capacity, bool running) {
  running_ = running;
  gaps_.reset(new uint64_t[capacity]);
  values_.reset(new uint32_t[capacity]);
  counts_.reset(new uint32_t[capacity]);
}

void SectionWriter::CutBlocks(bool in_blocks) {
  table_.samples =
      in_blocks ? std::max<size_t>(kBlockEntries * samples_ / entries_, 1)
                : samples_;
  size_t entry = 0;
  for (size_t sample = 0; sample < samples_; ++sample) {
    if (sample % table_.samples == 0) blocks_.push_back({sample, entry, 0});
    entry += counts_[sample];
  }
  blocks_.push_back({samples_, entries_, 0});
}

// Most entries occur once, so a list of the other entries, by their distances,
// takes fewer bits than one bit for each entry. The positions of these entries
// are unpredictable, so no branch depends on them.
void SectionWriter::FindRepeats() {
  size_t repeats = 0;
  for (size_t i = 0; i < entries_; ++i) repeats += values_[i] != 1;
  if (repeats == 0) return;
  repeat_gaps_.reset(new uint32_t[entries_]);
  repeat_counts_.reset(new uint32_t[entries_]);
  for (size_t b = 0; b + 1 < blocks_.size(); ++b) {
    blocks_[b].first_repeat = repeats_;
    size_t next = blocks_[b].first_entry;
    for (size_t i = next; i < blocks_[b + 1].first_entry; ++i) {
      const bool listed = values_[i] != 1;
      repeat_gaps_[repeats_] = static_cast<uint32_t>(i - next);
      repeat_counts_[repeats_] = values_[i];
      repeats_ += listed;
      next = listed ? i + 1 : next;
    }
  }
  blocks_.back().first_repeat = repeats_;
}

void SectionWriter::FillTable() {
  for (size_t b = 0; b + 1 < blocks_.size(); ++b) {
    const Block& block = blocks_[b];
    const size_t samples = blocks_[b + 1].first_sample - block.first_sample;
    const size_t entries = blocks_[b + 1].first_entry - block.first_entry;
    const size_t repeats = blocks_[b + 1].first_repeat - block.first_repeat;
    const uint64_t* gaps = gaps_.get() + block.first_entry;
    const uint64_t bits =
        RiceBits(counts_.get() + block.first_sample, samples, count_code_) +
        RiceBits(gaps, entries, gap_code_) +
        RiceBits(repeat_gaps_.get() + block.first_repeat, repeats,
                 repeat_gap_code_) +
        RiceBits(repeat_counts_.get() + block.first_repeat, repeats,
                 repeat_count_code_);
    table_.bytes.push_back((bits + 7) / 8);
    if (!single()) table_.entries.push_back(entries);
    if (repeats_ > 0) table_.repeats.push_back(repeats);
    if (running_) {
      table_.rows.push_back(std::accumulate(gaps, gaps + entries, entries));
    }
  }
  if (!in_blocks()) return;
  const auto choose = [this](const std::vector<uint64_t>& list) {
    const RiceCode code = ChooseRiceWithBase(list.data(), list.size());
    table_.bits += code.bits;
    return code;
  };
  table_.bytes_code = choose(table_.bytes);
  table_.entries_code = choose(table_.entries);
  table_.repeats_code = choose(table_.repeats);
  table_.rows_code = choose(table_.rows);
}

void SectionWriter::WriteHeader() {
  uint8_t* out = header_;
  *out++ = (weighted_ ? kWeighted : 0) | (repeats_ > 0 ? kRepeats : 0) |
           (single() ? kSingle : 0) | (running_ ? kRunning : 0) |
           (in_blocks() ? kBlocks : 0);
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
  if (in_blocks()) {
    out = PutVarint(table_.samples, out);
    out = PutCode(table_.bytes_code, out);
    if (!single()) out = PutCode(table_.entries_code, out);
    if (repeats_ > 0) out = PutCode(table_.repeats_code, out);
    if (running_) out = PutCode(table_.rows_code, out);
  }
  header_size_ = out - header_;
}

size_t SectionWriter::Finish(bool weighted, bool in_blocks) {
  if (entries_ == 0) return 0;
  weighted_ = weighted;
  CutBlocks(in_blocks);
  if (!weighted_) FindRepeats();
  count_code_ = ChooseRiceWithBase(counts_.get(), samples_);
  gap_code_ = ChooseRice(gaps_.get(), entries_, 0);
  repeat_gap_code_ = ChooseRice(repeat_gaps_.get(), repeats_, 0);
  repeat_count_code_ = ChooseRiceWithBase(repeat_counts_.get(), repeats_);
  FillTable();
  WriteHeader();
  return header_size_ + (table_.bits + 7) / 8 +
         std::accumulate(table_.bytes.begin(), table_.bytes.end(), size_t{0}) +
         (weighted_ ? entries_ * sizeof(float) : 0);
}

void SectionWriter::WriteBlock(const Block& block, const Block& end,
                               BitWriter* bits) const {
  PutRiceList(counts_.get() + block.first_sample,
              end.first_sample - block.first_sample, count_code_, bits);
  PutRiceList(gaps_.get() + block.first_entry,
              end.first_entry - block.first_entry, gap_code_, bits);
  const size_t repeats = end.first_repeat - block.first_repeat;
  PutRiceList(repeat_gaps_.get() + block.first_repeat, repeats,
              repeat_gap_code_, bits);
  PutRiceList(repeat_counts_.get() + block.first_repeat, repeats,
              repeat_count_code_, bits);
}

void SectionWriter::Write(uint8_t* out) const {
  std::memcpy(out, header_, header_size_);
  out += header_size_;
  if (in_blocks()) {
    BitWriter bits(out);
    const auto put = [&](const std::vector<uint64_t>& list,
                         const RiceCode& code) {
      PutRiceList(list.data(), list.size(), code, &bits);
    };
    put(table_.bytes, table_.bytes_code);
    put(table_.entries, table_.entries_code);
    put(table_.repeats, table_.repeats_code);
    put(table_.rows, table_.rows_code);
    out = bits.Finish();
  }
  for (size_t b = 0; b + 1 < blocks_.size(); ++b) {
    BitWriter bits(out);
    WriteBlock(blocks_[b], blocks_[b + 1], &bits);
    out = bits.Finish();
  }
  if (weighted_) std::memcpy(out, values_.get(), entries_ * sizeof(float));
}

}  // namespace tfdist
