// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "header_bytes.h"
#include "id_section.h"

namespace tfdist {
namespace {

// The next number of a list, constant lists costing no bits.
uint64_t Next(const RiceCode& code, BitReader* bits) {
  if (code.k == RiceCode::kConstant) return code.base;
  return code.base + bits->GetRice(code.k);
}

// From positions on the line to rows; all are within the line.
void TranslatePositions(const std::vector<int64_t>& hot_rows, int64_t count,
                        int64_t* rows) {
  const auto hot = static_cast<int64_t>(hot_rows.size());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = rows[i];
    rows[i] = position < hot ? hot_rows[position] : position - hot;
  }
}

constexpr char kTruncated[] = "it ends before its last entry";
constexpr char kOutOfRange[] = "a row is out of range";
constexpr char kParameters[] = "its code parameters are out of range";

}  // namespace

const char* SectionReader::ReadHeader(const uint8_t* data, size_t size) {
  HeaderReader header(data, size);
  const uint8_t flags = header.Byte();
  hot_ = flags & kHot;
  has_head_ = flags & kHead;
  if (hot_) hot_hash_ = header.Fixed<uint16_t>();
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
  if (!hot_) gap_code_.k = header.Parameter();
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
      (weighted_ && (repeats > 0 || has_head_)) || (has_head_ && !hot_) ||
      (running_ && (hot_ || samples != entries))) {
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

const char* SectionReader::ReadPositions(BitReader* bits, const HotLine& line,
                                         int64_t first_entry,
                                         const int64_t* row_splits,
                                         int64_t* positions) const {
  OctaveCodes codes;
  if (!codes.GetParameters(bits, line.octaves())) return kParameters;
  const uint64_t limit = line.hot + line.rows;
  int64_t entry = 0;
  for (int64_t sample = 0; sample < samples_; ++sample) {
    const int64_t end = row_splits[sample + 1] - first_entry;
    uint64_t next = 0;
    for (; entry < end; ++entry) {
      const uint64_t gap = bits->GetRice(codes.k(line.OctaveOf(next)));
      const uint64_t position = next + gap;
      if (gap >= limit || position >= limit) return kOutOfRange;
      positions[entry] = static_cast<int64_t>(position);
      next = position + 1;
    }
  }
  return nullptr;
}

const char* SectionReader::ReadSingles(BitReader* bits, const HotLine& line,
                                       int64_t* positions) const {
  const int octaves = line.octaves() - 1;
  for (int64_t entry = 0; entry < entries_; ++entry) {
    uint64_t position;
    if (bits->Get(1)) {
      const int octave = static_cast<int>(bits->Get(line.octave_bits()));
      if (octave >= octaves) return kOutOfRange;
      position = (uint64_t{1} << octave) - 1 + bits->Get(octave);
      if (position >= static_cast<uint64_t>(line.hot)) return kOutOfRange;
    } else {
      position = line.hot + bits->Get(line.row_bits());
      if (position >= static_cast<uint64_t>(line.hot + line.rows)) {
        return kOutOfRange;
      }
    }
    positions[entry] = static_cast<int64_t>(position);
  }
  return nullptr;
}

// How often the first positions occur; the other weights stay as they are.
const char* SectionReader::ReadHead(BitReader* bits, const HotLine& line,
                                    const int64_t* positions,
                                    float* weights) const {
  OctaveCodes codes;
  if (!codes.GetParameters(bits, kHeadOctaves)) return kParameters;
  for (int64_t entry = 0; entry < entries_; ++entry) {
    const int octave = line.OctaveOf(positions[entry]);
    if (octave >= kHeadOctaves) continue;
    weights[entry] = static_cast<float>(bits->GetRice(codes.k(octave)) + 1);
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

const char* SectionReader::ReadEntries(uint64_t row_limit, const HotRows* hot,
                                       int64_t first_entry, int64_t* row_splits,
                                       int64_t* rows, float* weights) const {
  BitReader bits(body_, body_size_);
  HotLine line;
  if (hot_) {
    if (hot == nullptr || hot->hash != hot_hash_ || hot->rows.empty()) {
      return "its sender has other hot_ids than this rank";
    }
    line.hot = static_cast<int64_t>(hot->rows.size());
    line.rows = static_cast<int64_t>(row_limit);
  }
  const char* error = ReadCounts(&bits, first_entry, row_splits);
  if (error != nullptr) return error;
  error = !hot_ ? ReadRows(&bits, row_limit, first_entry, row_splits, rows)
          : samples_ == entries_
              ? ReadSingles(&bits, line, rows)
              : ReadPositions(&bits, line, first_entry, row_splits, rows);
  if (error != nullptr) return error;
  if (weights != nullptr) std::fill(weights, weights + entries_, 1.0f);
  if (needs_weights() && weights == nullptr) {
    return "its weights have nowhere to go";
  }
  if (has_head_) {
    error = ReadHead(&bits, line, rows, weights);
    if (error != nullptr) return error;
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
  if (hot_) TranslatePositions(hot->rows, entries_, rows);
  return nullptr;
}

}  // namespace tfdist
