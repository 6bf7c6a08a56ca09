// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "custom_ops/embedding/header_bytes.h"
#include "custom_ops/embedding/id_section.h"

namespace tfdist {
namespace {

// The next number of a list, constant lists costing no bits.
uint64_t Next(const RiceCode& code, BitReader* bits) {
  if (code.k == RiceCode::kConstant) return code.base;
  return code.base + bits->GetRice(code.k);
}

constexpr char kTruncated[] = "it ends before its last entry";
constexpr char kOutOfRange[] = "a row is out of range";

}  // namespace

const char* SectionReader::ReadHeader(const uint8_t* data, size_t size) {
  HeaderReader header(data, size);
  const uint8_t flags = header.Byte();
  const uint64_t entries = header.Varint();
  uint64_t samples = entries;
  uint64_t repeats = 0;
  weighted_ = flags & kWeighted;
  running_ = flags & kRunning;
  if (flags & kSingle) {
    count_code_.base = 1;
  } else {
    samples = header.Varint();
    count_code_ = header.Code();
  }
  gap_code_.k = header.Parameter();
  if (flags & kRepeats) {
    repeats = header.Varint();
    repeat_gap_code_.k = header.Parameter();
    repeat_count_code_ = header.Code();
  }
  if (!header.ok() || (flags & ~kAllFlags) != 0)
    return "its header is malformed";
  body_ = header.next();
  body_size_ = header.left();
  // Every gap takes at least one bit, every sample at least one entry.
  if (entries > uint64_t{8} * body_size_) return kTruncated;
  if (entries == 0 || samples == 0 || samples > entries || repeats > entries ||
      (weighted_ && repeats > 0) || (running_ && samples != entries)) {
    return "its sizes contradict each other";
  }
  entries_ = static_cast<int64_t>(entries);
  samples_ = static_cast<int64_t>(samples);
  repeats_ = static_cast<int64_t>(repeats);
  return nullptr;
}

const char* SectionReader::ReadCounts(BitReader* bits, int64_t first_entry,
                                      int64_t* row_splits) const {
  uint64_t end = 0;
  const uint64_t entries = entries_;
  for (int64_t sample = 0; sample < samples_; ++sample) {
    const uint64_t count = Next(count_code_, bits);
    if (count == 0 || count > entries - end) {
      return "its counts exceed its entries";
    }
    end += count;
    row_splits[sample + 1] = first_entry + static_cast<int64_t>(end);
  }
  if (end != entries) return "its counts do not add up to its entries";
  return nullptr;
}

const char* SectionReader::ReadRows(BitReader* bits, uint64_t row_limit,
                                    int64_t first_entry,
                                    const int64_t* row_splits,
                                    int64_t* rows) const {
  int64_t entry = 0;
  uint64_t next_row = 0;
  for (int64_t sample = 0; sample < samples_; ++sample) {
    const int64_t end = row_splits[sample + 1] - first_entry;
    if (!running_) next_row = 0;
    for (; entry < end; ++entry) {
      const uint64_t gap = bits->GetRice(gap_code_.k);
      const uint64_t row = next_row + gap;
      if (gap >= row_limit || row >= row_limit) return kOutOfRange;
      rows[entry] = static_cast<int64_t>(row);
      next_row = row + 1;
    }
  }
  return nullptr;
}

const char* SectionReader::ReadRepeats(BitReader* bits, float* weights) const {
  uint64_t next = 0;
  const uint64_t entries = entries_;
  for (int64_t i = 0; i < repeats_; ++i) {
    const uint64_t gap = bits->GetRice(repeat_gap_code_.k);
    if (next >= entries || gap >= entries - next) {
      return "a repeat lies past its entries";
    }
    weights[next + gap] = 0;  // marks the entry, its count follows
    next += gap + 1;
  }
  int64_t entry = 0;
  for (int64_t i = 0; i < repeats_; ++i) {
    while (weights[entry] != 0) ++entry;
    weights[entry] = static_cast<float>(
        std::max<uint64_t>(Next(repeat_count_code_, bits), 1));
  }
  return nullptr;
}

const char* SectionReader::ReadEntries(uint64_t row_limit, int64_t first_entry,
                                       int64_t* row_splits, int64_t* rows,
                                       float* weights) const {
  BitReader bits(body_, body_size_);
  const char* error = ReadCounts(&bits, first_entry, row_splits);
  if (error != nullptr) return error;
  error = ReadRows(&bits, row_limit, first_entry, row_splits, rows);
  if (error != nullptr) return error;
  if (weights != nullptr) std::fill(weights, weights + entries_, 1.0f);
  if (needs_weights() && weights == nullptr) {
    return "its weights have nowhere to go";
  }
  if (repeats_ > 0) {
    error = ReadRepeats(&bits, weights);
    if (error != nullptr) return error;
  }
  if (!bits.ok()) return kTruncated;
  const size_t read = bits.bytes_read();
  const size_t weight_bytes = weighted_ ? entries_ * sizeof(float) : 0;
  if (body_size_ - read != weight_bytes) return "its size is wrong";
  if (weighted_) std::memcpy(weights, body_ + read, weight_bytes);
  return nullptr;
}

}  // namespace tfdist
