// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "custom_ops/codec/header_bytes.h"
#include "custom_ops/codec/id_section.h"

namespace tfdist {
namespace {

constexpr char kMalformed[] = "its header is malformed";
constexpr char kContradict[] = "its sizes contradict each other";
constexpr char kWrongSize[] = "its size is wrong";
constexpr char kTruncated[] = "it ends before its last entry";
// Limit of the rows of a table, so that sums of numbers from a message do not
// overflow.
constexpr uint64_t kMostRows = uint64_t{1} << 62;

}  // namespace

const char* Reason(IdError error) {
  switch (error) {
    case IdError::kCountsExceed:
      return "its counts exceed its entries";
    case IdError::kCountsLack:
      return "its counts do not add up to its entries";
    case IdError::kOutOfRange:
      return "a row is out of range";
    case IdError::kRowsContradict:
      return "its rows contradict its blocks";
    case IdError::kRepeatPastEnd:
      return "a repeat lies past its entries";
    case IdError::kTruncated:
      return kTruncated;
    case IdError::kWrongSize:
      return kWrongSize;
    default:
      return nullptr;
  }
}

const char* SectionReader::ReadHeader(const uint8_t* data, size_t size) {
  HeaderReader header(data, size);
  const uint8_t flags = header.Byte();
  const uint64_t entries = header.Varint();
  uint64_t samples = entries;
  uint64_t repeats = 0;
  codes_.weighted = flags & kWeighted;
  codes_.running = flags & kRunning;
  if (flags & kSingle) {
    codes_.counts.base = 1;
  } else {
    samples = header.Varint();
    codes_.counts = header.Code();
  }
  codes_.gaps = header.Parameter();
  if (flags & kRepeats) {
    repeats = header.Varint();
    codes_.repeat_gaps = header.Parameter();
    codes_.repeat_counts = header.Code();
  }
  if (!header.ok() || (flags & ~kAllFlags) != 0) return kMalformed;
  // Every gap takes at least one bit, and every sample has at least one entry.
  if (entries > uint64_t{8} * header.left()) return kTruncated;
  if (entries == 0 || samples == 0 || samples > entries || repeats > entries ||
      (codes_.weighted && repeats > 0) ||
      (codes_.running && samples != entries)) {
    return kContradict;
  }
  entries_ = static_cast<int64_t>(entries);
  samples_ = static_cast<int64_t>(samples);
  repeats_ = static_cast<int64_t>(repeats);
  if (flags & kBlocks) {
    const char* error = ReadBlockTable(flags, &header);
    if (error != nullptr) return error;
  } else {
    blocks_.assign(1, {});
    blocks_[0].samples = samples_;
    blocks_[0].entries = entries_;
    blocks_[0].repeats = repeats_;
  }
  return PlaceBlocks(flags & kBlocks, header.next() - data, header.left());
}

const char* SectionReader::ReadBlockTable(uint8_t flags, HeaderReader* header) {
  const uint64_t samples = header->Varint();  // samples of a block
  const RiceCode bytes = header->Code();
  RiceCode entries, repeats, rows;
  if (!(flags & kSingle)) entries = header->Code();
  if (flags & kRepeats) repeats = header->Code();
  if (flags & kRunning) rows = header->Code();
  if (!header->ok() || samples == 0) return kMalformed;
  const uint64_t count = (samples_ - 1) / samples + 1;
  // Each block takes at least a byte.
  if (count > header->left()) return kTruncated;
  BitReader bits(header->next(), header->left());
  blocks_.assign(count, {});
  uint64_t left = samples_;
  for (IdBlock& block : blocks_) {
    block.samples = static_cast<int64_t>(std::min(samples, left));
    left -= block.samples;
    block.bytes = bytes.Next(&bits);
  }
  for (IdBlock& block : blocks_) {
    block.entries = flags & kSingle ? block.samples : entries.Next(&bits);
  }
  for (IdBlock& block : blocks_) block.repeats = repeats.Next(&bits);
  for (IdBlock& block : blocks_) block.end_row = rows.Next(&bits);
  if (!bits.ok()) return kTruncated;
  header->Skip(bits.bytes_read());
  return nullptr;
}

// Sets the positions of blocks and weights. `left` bytes follow from offset
// `at`: first the blocks, then the weights.
const char* SectionReader::PlaceBlocks(bool has_table, size_t at, size_t left) {
  const size_t weights = codes_.weighted ? entries_ * sizeof(float) : 0;
  if (weights > left) return kTruncated;
  size_t weights_at = at + left - weights;
  if (!has_table) blocks_[0].bytes = left - weights;
  IdBlock next = {};
  for (IdBlock& block : blocks_) {
    if (block.bytes > weights_at - at) return kWrongSize;
    const uint64_t entries = block.entries;
    const uint64_t repeats = block.repeats;
    const uint64_t rows = block.end_row;
    if (entries < static_cast<uint64_t>(block.samples) ||
        (has_table && codes_.running && rows < entries) ||
        entries > static_cast<uint64_t>(entries_ - next.first_entry) ||
        repeats > static_cast<uint64_t>(repeats_ - next.repeats) ||
        rows > kMostRows - next.next_row) {
      return kContradict;
    }
    block.at = at;
    block.weights_at = weights_at + next.first_entry * sizeof(float);
    block.first_sample = next.first_sample;
    block.first_entry = next.first_entry;
    block.next_row = next.next_row;
    block.end_row += next.next_row;
    at += block.bytes;
    next.first_sample += block.samples;
    next.first_entry += block.entries;
    next.repeats += block.repeats;
    next.next_row = block.end_row;
  }
  if (next.first_entry != entries_ || next.repeats != repeats_) {
    return kContradict;
  }
  return at == weights_at ? nullptr : kWrongSize;
}

}  // namespace tfdist
