// SPDX-License-Identifier: Apache-2.0
#include "id_codec.h"

#include <algorithm>
#include <cstring>

namespace tfdist {
namespace {

constexpr uint8_t kVersion = 1;
constexpr uint8_t kVersionMask = 0x0F;
constexpr uint8_t kWeighted = 0x10;
constexpr uint8_t kRepeats = 0x20;
constexpr uint8_t kBadId = 0x40;

// Seven bits per byte, least significant first; the top bit says "more".
uint8_t* PutVarint(uint64_t value, uint8_t* out) {
  for (; value >= 0x80; value >>= 7) {
    *out++ = static_cast<uint8_t>(value | 0x80);
  }
  *out++ = static_cast<uint8_t>(value);
  return out;
}

uint8_t* PutCode(const RiceCode& code, uint8_t* out) {
  *out++ = static_cast<uint8_t>(code.k);
  return PutVarint(code.base, out);
}

// Takes header fields off the front of a message; after the first field that is
// not there, ok() is false and every further field reads as 0.
class HeaderReader {
 public:
  HeaderReader(const uint8_t* data, size_t size)
      : next_(data), end_(data + size) {}

  uint8_t Byte() {
    if (next_ == end_) {
      ok_ = false;
      return 0;
    }
    return *next_++;
  }

  uint64_t Varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint8_t byte = Byte();
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if ((byte & 0x80) == 0) return value;
    }
    ok_ = false;
    return 0;
  }

  template <typename T>
  T Fixed() {
    T value{};
    if (static_cast<size_t>(end_ - next_) < sizeof(T)) {
      ok_ = false;
      return value;
    }
    std::memcpy(&value, next_, sizeof(T));
    next_ += sizeof(T);
    return value;
  }

  RiceCode Code() {
    RiceCode code;
    code.k = Byte();
    code.base = Varint();
    if (code.k > RiceCode::kMaxK && code.k != RiceCode::kConstant) ok_ = false;
    return code;
  }

  bool ok() const { return ok_; }
  const uint8_t* next() const { return next_; }

 private:
  const uint8_t* next_;
  const uint8_t* end_;
  bool ok_ = true;
};

// The next number of a list, constant lists costing no bits.
uint64_t Next(const RiceCode& code, BitReader* bits) {
  if (code.k == RiceCode::kConstant) return code.base;
  return code.base + bits->GetRice(code.k);
}

constexpr char kTruncated[] = "it ends before its last entry";

}  // namespace

MessageWriter::MessageWriter(size_t capacity)
    : gaps_(new uint64_t[capacity]),
      values_(new uint32_t[capacity]),
      counts_(new uint32_t[capacity]) {}

// Most entries occur once: listing the others, by their distance from each
// other, is cheaper than one bit for every entry.
void MessageWriter::FindRepeats() {
  for (size_t i = 0; i < entries_; ++i) repeats_ += values_[i] != 1;
  repeat_gaps_.reset(new uint32_t[repeats_]);
  repeat_counts_.reset(new uint32_t[repeats_]);
  size_t repeat = 0;
  size_t next = 0;
  for (size_t i = 0; i < entries_; ++i) {
    if (values_[i] == 1) continue;
    repeat_gaps_[repeat] = static_cast<uint32_t>(i - next);
    repeat_counts_[repeat++] = values_[i];
    next = i + 1;
  }
}

size_t MessageWriter::Finish(int rank, float samples_weight, bool weighted,
                             const BadId& bad_id) {
  weighted_ = weighted;
  if (bad_id.found) samples_ = entries_ = 0;
  if (!weighted_) FindRepeats();
  count_code_ = ChooseRiceWithBase(counts_.get(), samples_);
  gap_code_ = ChooseRice(gaps_.get(), entries_, 0);
  repeat_gap_code_ = ChooseRice(repeat_gaps_.get(), repeats_, 0);
  repeat_count_code_ = ChooseRiceWithBase(repeat_counts_.get(), repeats_);

  uint8_t* out = header_;
  *out++ = kVersion | (weighted_ ? kWeighted : 0) |
           (repeats_ > 0 ? kRepeats : 0) | (bad_id.found ? kBadId : 0);
  out = PutVarint(rank, out);
  std::memcpy(out, &samples_weight, sizeof(float));
  out += sizeof(float);
  if (bad_id.found) {
    std::memcpy(out, &bad_id.sample, sizeof(int64_t));
    std::memcpy(out + sizeof(int64_t), &bad_id.id, sizeof(int64_t));
    out += 2 * sizeof(int64_t);
  }
  out = PutVarint(entries_, out);
  if (entries_ > 0) {
    out = PutVarint(samples_, out);
    out = PutCode(count_code_, out);
    *out++ = static_cast<uint8_t>(gap_code_.k);
  }
  if (repeats_ > 0) {
    out = PutVarint(repeats_, out);
    *out++ = static_cast<uint8_t>(repeat_gap_code_.k);
    out = PutCode(repeat_count_code_, out);
  }
  header_size_ = out - header_;
  const uint64_t bits = count_code_.bits + gap_code_.bits +
                        repeat_gap_code_.bits + repeat_count_code_.bits;
  return header_size_ + (bits + 7) / 8 +
         (weighted_ ? entries_ * sizeof(float) : 0);
}

void MessageWriter::Write(uint8_t* out) const {
  std::memcpy(out, header_, header_size_);
  BitWriter bits(out + header_size_);
  PutRiceList(counts_.get(), samples_, count_code_, &bits);
  PutRiceList(gaps_.get(), entries_, gap_code_, &bits);
  PutRiceList(repeat_gaps_.get(), repeats_, repeat_gap_code_, &bits);
  PutRiceList(repeat_counts_.get(), repeats_, repeat_count_code_, &bits);
  out = bits.Finish();
  if (weighted_) std::memcpy(out, values_.get(), entries_ * sizeof(float));
}

const char* MessageReader::ReadHeader(const uint8_t* data, size_t size) {
  HeaderReader header(data, size);
  const uint8_t flags = header.Byte();
  if ((flags & kVersionMask) != kVersion) return "its version is unknown";
  weighted_ = flags & kWeighted;
  rank_ = static_cast<int64_t>(header.Varint());
  samples_weight_ = header.Fixed<float>();
  if (flags & kBadId) {
    bad_id_.found = true;
    bad_id_.sample = header.Fixed<int64_t>();
    bad_id_.id = header.Fixed<int64_t>();
  }
  const uint64_t entries = header.Varint();
  uint64_t samples = 0;
  uint64_t repeats = 0;
  if (entries > 0) {
    samples = header.Varint();
    count_code_ = header.Code();
    gap_code_.k = header.Byte();
  }
  if (flags & kRepeats) {
    repeats = header.Varint();
    repeat_gap_code_.k = header.Byte();
    repeat_count_code_ = header.Code();
  }
  if (!header.ok()) return "its header is malformed";
  body_ = header.next();
  body_size_ = data + size - body_;
  // Every gap takes at least one bit, every sample at least one entry.
  if (entries > uint64_t{8} * body_size_) return kTruncated;
  if (samples > entries || (entries > 0 && samples == 0) || repeats > entries ||
      (weighted_ && repeats > 0)) {
    return "its sizes contradict each other";
  }
  if ((entries > 0 && gap_code_.k > RiceCode::kMaxK) ||
      (repeats > 0 && repeat_gap_code_.k > RiceCode::kMaxK)) {
    return "its header is malformed";
  }
  entries_ = static_cast<int64_t>(entries);
  samples_ = static_cast<int64_t>(samples);
  repeats_ = static_cast<int64_t>(repeats);
  return nullptr;
}

const char* MessageReader::ReadCounts(BitReader* bits, int64_t first_entry,
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

const char* MessageReader::ReadRepeats(BitReader* bits, float* weights) const {
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

const char* MessageReader::ReadEntries(uint64_t row_limit, int64_t first_entry,
                                       int64_t* row_splits, int64_t* rows,
                                       float* weights) const {
  BitReader bits(body_, body_size_);
  const char* error = ReadCounts(&bits, first_entry, row_splits);
  if (error != nullptr) return error;
  int64_t entry = 0;
  for (int64_t sample = 0; sample < samples_; ++sample) {
    const int64_t end = row_splits[sample + 1] - first_entry;
    uint64_t next_row = 0;
    for (; entry < end; ++entry) {
      const uint64_t gap = bits.GetRice(gap_code_.k);
      const uint64_t row = next_row + gap;
      if (gap >= row_limit || row >= row_limit) return "a row is out of range";
      rows[entry] = static_cast<int64_t>(row);
      next_row = row + 1;
    }
  }
  if (weights != nullptr) std::fill(weights, weights + entries_, 1.0f);
  if (repeats_ > 0) {
    if (weights == nullptr) return "its repeats have nowhere to go";
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
