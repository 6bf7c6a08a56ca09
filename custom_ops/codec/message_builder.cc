// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/codec/message_builder.h"

#include <algorithm>
#include <cstring>

#include "custom_ops/codec/header_bytes.h"
#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/parallel_tasks.h"

namespace tfdist {

using tensorflow::Tensor;
using tensorflow::TensorShape;

constexpr int64_t kNanosecondsPerEntry = 12;

MessageBuilder::MessageBuilder(const PlacementPlan& plan,
                               const std::vector<FeatureEntries>& entries,
                               const MessageHeader& header, bool in_blocks,
                               tensorflow::thread::ThreadPool* pool)
    : plan_(plan),
      entries_(entries),
      header_(header),
      in_blocks_(in_blocks),
      pool_(pool) {
  if (header.bad_id.found) return;
  int64_t total = 0;
  for (size_t f = 0; f < entries.size(); ++f) {
    first_section_.push_back(sections_.size());
    const int64_t parts = plan.features()[f].row_parts;
    for (int64_t part = 0; part < parts; ++part) {
      sections_.emplace_back();
      sections_.back().feature = f;
      sections_.back().part = part;
    }
    for (const EntryBuilder& range : entries[f].ranges) {
      total += range.Begin(parts);
    }
  }
  const int64_t sections = std::max<int64_t>(sections_.size(), 1);
  cost_ = kNanosecondsPerEntry * (total / sections + 1);
}

template <typename F>
void MessageBuilder::ForAllSections(F f) const {
  ParallelUnits(pool_, sections_.size(), cost_,
                [&](int64_t first, int64_t last) {
                  for (int64_t i = first; i < last; ++i) f(i);
                });
}

int64_t MessageBuilder::SectionOf(size_t feature, int64_t rank) const {
  const PlacementPlan::Cell& cell = plan_.CellOf(feature, rank);
  return cell.exists ? first_section_[feature] + cell.row_part : kNoSection;
}

void MessageBuilder::CodeSection(Section* section) const {
  const FeatureEntries& entries = entries_[section->feature];
  int64_t count = 0;
  for (const EntryBuilder& range : entries.ranges) {
    count += range.Begin(section->part + 1) - range.Begin(section->part);
  }
  section->writer.Reserve(count, entries.unique);
  section->sample_ids.resize(count);
  int32_t* next = section->sample_ids.data();
  for (const EntryBuilder& range : entries.ranges) {
    next =
        range.Emit(range.Begin(section->part), range.Begin(section->part + 1),
                   entries.weighted, &section->writer, next);
  }
  section->sample_ids.resize(next - section->sample_ids.data());
  section->bytes = section->writer.Finish(entries.weighted, in_blocks_);
}

void MessageBuilder::Code() {
  ForAllSections([this](int64_t i) { CodeSection(&sections_[i]); });
}

absl::Status MessageBuilder::WritePayload(
    tensorflow::OpKernelContext* ctx) const {
  uint8_t header[MessageHeader::kMaxBytes];
  const int64_t header_size = header_.Write(header) - header;
  // The positions of each section in the payload. The section is written to the
  // first position and copied to the others.
  std::vector<std::vector<int64_t>> places(sections_.size());
  std::vector<int64_t> starts;
  Tensor* splits = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 1, {plan_.world_size()}, &splits));
  int64_t end = 0;
  for (int64_t rank = 0; rank < plan_.world_size(); ++rank) {
    starts.push_back(end);
    end += header_size;
    for (size_t f = 0; f < first_section_.size(); ++f) {
      const int64_t section = SectionOf(f, rank);
      if (section == kNoSection) continue;
      places[section].push_back(end);
      const int64_t bytes = sections_[section].bytes;
      end += VarintSize(bytes) + bytes;
    }
    splits->vec<int64_t>()(rank) = end - starts.back();
  }
  Tensor* payload = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {end}, &payload));
  auto* out = static_cast<uint8_t*>(payload->data());
  for (const int64_t start : starts) {
    std::memcpy(out + start, header, header_size);
  }
  ForAllSections([&](int64_t i) {
    const Section& section = sections_[i];
    uint8_t* first = out + places[i][0];
    uint8_t* body = PutVarint(section.bytes, first);
    if (section.bytes > 0) section.writer.Write(body);
    const int64_t size = body - first + section.bytes;
    for (size_t copy = 1; copy < places[i].size(); ++copy) {
      std::memcpy(out + places[i][copy], first, size);
    }
  });
  return absl::OkStatus();
}

absl::Status MessageBuilder::WriteSamples(
    tensorflow::OpKernelContext* ctx) const {
  const int64_t features = entries_.size();
  Tensor* splits = nullptr;
  TF_RETURN_IF_ERROR(
      AllocateOutput(ctx, 3, {plan_.world_size(), features}, &splits));
  auto sizes = splits->matrix<int64_t>();
  sizes.setZero();
  int64_t total = 0;
  for (int64_t rank = 0; rank < plan_.world_size(); ++rank) {
    for (size_t f = 0; f < first_section_.size(); ++f) {
      const int64_t section = SectionOf(f, rank);
      if (section == kNoSection) continue;
      sizes(rank, f) = sections_[section].sample_ids.size();
      total += sizes(rank, f);
    }
  }
  Tensor* sample_ids = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 2, {total}, &sample_ids));
  auto* out = static_cast<int32_t*>(sample_ids->data());
  for (int64_t rank = 0; rank < plan_.world_size(); ++rank) {
    for (size_t f = 0; f < first_section_.size(); ++f) {
      const int64_t section = SectionOf(f, rank);
      if (section == kNoSection) continue;
      const std::vector<int32_t>& ids = sections_[section].sample_ids;
      out = std::copy(ids.begin(), ids.end(), out);
    }
  }
  return absl::OkStatus();
}

}  // namespace tfdist
