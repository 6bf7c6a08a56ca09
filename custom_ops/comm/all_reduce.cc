// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/all_reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "custom_ops/comm/process_group.h"
#include "custom_ops/common/message.h"

namespace tfdist {

namespace {

constexpr size_t kSegmentBytes = size_t{512} << 10;
constexpr size_t kInlineBytes = size_t{256} << 10;

}  // namespace

Header AllReduce::MakeHeader() const {
  Header header;
  header.dtype = options_.dtype;
  header.agreed = options_.bytes();
  header.shape_hash = options_.shape_hash;
  header.weight = options_.weight;
  header.root = static_cast<int32_t>(form_);
  if (options_.weighted) header.flags |= kWeightedFlag;
  SetText(header.shapes, options_.shapes.c_str());
  return header;
}

AllReduce::AllReduce(Operation& operation, const Options& options)
    : operation_(operation),
      options_(options),
      sum_(FindSum(static_cast<tensorflow::DataType>(options.dtype))),
      partial_(
          FindPartialSum(static_cast<tensorflow::DataType>(options.dtype))),
      form_(operation.group->all_reduce_choice().Choose(
          options.bytes(), partial_.bytes / options.element_bytes)),
      small_(form_ == AllReduceForm::kDirect &&
             operation.group->all_reduce_choice().IsSmall(options.bytes())),
      exchange_(operation, MakeHeader()) {}

bool AllReduce::posts_inline() const {
  if (form_ == AllReduceForm::kDirect) return small_;
  return form_ == AllReduceForm::kRing || options_.bytes() <= kInlineBytes;
}

void AllReduce::Post() {
  switch (form_) {
    case AllReduceForm::kTree:
      return PostTree();
    case AllReduceForm::kRing:
      exchange_.ExpectAll();
      exchange_.SetExpectedBytes(0);
      return exchange_.SendToAll(nullptr, 0);
    case AllReduceForm::kDirect:
      exchange_.ExpectAll();
      if (!small_) return PostLarge();
      exchange_.SetExpectedBytes(options_.bytes());
      return exchange_.SendToAll(options_.input, options_.bytes());
  }
}

void AllReduce::Run() {
  if (form_ == AllReduceForm::kTree) return RunTree();
  exchange_.AwaitHeaders();
  if (options_.weighted) ReadWeights();
  if (form_ == AllReduceForm::kRing) return RunRing();
  if (small_) return RunSmall();
  RunLarge();
}

void AllReduce::ReadWeights() {
  const int world_size = operation_.group->world_size();
  weights_.resize(world_size);
  double total = 0;
  bool equal = true;
  for (int rank = 0; rank < world_size; ++rank) {
    const double weight = rank == operation_.group->rank()
                              ? options_.weight
                              : exchange_.header(rank).weight;
    weights_[rank] = static_cast<float>(weight);
    total += weight;
    equal = equal && weights_[rank] == weights_[0];
  }
  scale_ = total > 0 ? static_cast<float>(world_size / total) : 0;
  // If all weights are equal, as with full batches on all ranks, a plain sum is
  // enough.
  if (equal && total > 0) weights_.clear();
}

void AllReduce::RunSmall() {
  const int world_size = operation_.group->world_size();
  std::vector<const void*> inputs(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    inputs[rank] = rank == operation_.group->rank() ? options_.input
                                                    : exchange_.Receive(rank);
  }
  exchange_.AwaitPayloads();
  exchange_.AwaitSent();  // the output may be the memory that is being sent
  Sum({0, options_.count}, std::move(inputs));
}

AllReduce::Chunk AllReduce::ChunkOf(int rank) const {
  const int world_size = operation_.group->world_size();
  // Chunks are multiples of a cache line, so that two phases never write to the
  // same line.
  const size_t unit = 64 / options_.element_bytes;
  const size_t units = (options_.count + unit - 1) / unit;
  const auto boundary = [&](size_t r) {
    return std::min(units * r / world_size * unit, options_.count);
  };
  Chunk chunk;
  chunk.begin = boundary(rank);
  chunk.count = boundary(rank + 1) - chunk.begin;
  chunk.segments = (chunk.count * options_.element_bytes + kSegmentBytes - 1) /
                   kSegmentBytes;
  return chunk;
}

AllReduce::Segment AllReduce::SegmentOf(const Chunk& chunk,
                                        size_t segment) const {
  const size_t most = kSegmentBytes / options_.element_bytes;
  return {chunk.begin + segment * most,
          std::min(most, chunk.count - segment * most)};
}

const uint8_t* AllReduce::Input(size_t element) const {
  return static_cast<const uint8_t*>(options_.input) +
         element * options_.element_bytes;
}

uint8_t* AllReduce::Output(size_t element) const {
  return static_cast<uint8_t*>(options_.output) +
         element * options_.element_bytes;
}

size_t AllReduce::WeightedCount(const Segment& segment) const {
  const size_t end = options_.count - options_.unweighted;
  return std::min(end - std::min(end, segment.begin), segment.count);
}

void AllReduce::Sum(const Segment& segment, std::vector<const void*> inputs) {
  const int world_size = static_cast<int>(inputs.size());
  const size_t weighted = weights_.empty() ? 0 : WeightedCount(segment);
  uint8_t* output = Output(segment.begin);
  if (weighted > 0) {
    sum_(output, inputs.data(), weights_.data(), world_size, scale_, weighted);
  }
  if (weighted == segment.count) return;
  const size_t done = weighted * options_.element_bytes;
  for (const void*& input : inputs) {
    input = static_cast<const uint8_t*>(input) + done;
  }
  sum_(output + done, inputs.data(), nullptr, world_size, 1,
       segment.count - weighted);
}

void AllReduce::AddInput(const Segment& segment, uint8_t* sums,
                         const uint8_t* before, const float* weight) const {
  const size_t weighted = weight == nullptr ? 0 : WeightedCount(segment);
  const uint8_t* input = Input(segment.begin);
  if (weighted > 0) partial_.add(sums, before, input, weight, weighted);
  if (weighted == segment.count) return;
  const size_t done = weighted * partial_.bytes;
  partial_.add(sums + done, before == nullptr ? nullptr : before + done,
               input + weighted * options_.element_bytes, nullptr,
               segment.count - weighted);
}

void AllReduce::Finish(const Segment& segment, const uint8_t* sums,
                       const float* scale) const {
  const size_t weighted = scale == nullptr ? 0 : WeightedCount(segment);
  uint8_t* output = Output(segment.begin);
  if (weighted > 0) partial_.finish(output, sums, scale, weighted);
  if (weighted == segment.count) return;
  partial_.finish(output + weighted * options_.element_bytes,
                  sums + weighted * partial_.bytes, nullptr,
                  segment.count - weighted);
}

void AllReduce::SendPart(int peer, uint32_t part, const void* data,
                         size_t bytes) {
  Header header = MakeHeader();
  header.part = part;
  header.bytes = bytes;
  operation_.Send(peer, header, data);
}

Incoming* AllReduce::ExpectPart(int peer, uint32_t part, void* memory,
                                size_t bytes) {
  Incoming* message = operation_.Expect(peer, part);
  operation_.Give(peer, message, memory, bytes);
  return message;
}

void AllReduce::AwaitPart(int peer, Incoming* message, const char* stage) {
  operation_.AwaitHeader(peer, message, stage);
  operation_.AwaitBytes(peer, message, message->header.bytes, stage);
}

// Expects the sums in the output, which may be the input: this rank has already
// sent the elements that a peer has summed.
void AllReduce::PostLarge() {
  ProcessGroup& group = *operation_.group;
  const size_t size = options_.element_bytes;
  exchange_.SetExpectedBytes(ChunkOf(group.rank()).count * size);
  for (int step = 1; step < group.world_size(); ++step) {
    const int peer = group.PeerAfter(step);
    const Chunk theirs = ChunkOf(peer);
    exchange_.Send(peer, Input(theirs.begin), theirs.count * size);
  }
  parts_.resize(group.world_size());
  for (int step = 1; step < group.world_size(); ++step) {
    const int peer = group.PeerBefore(step);
    const Chunk theirs = ChunkOf(peer);
    for (size_t s = 0; s < theirs.segments; ++s) {
      const Segment segment = SegmentOf(theirs, s);
      uint8_t* memory = Output(segment.begin);
      parts_[peer].push_back(
          {ExpectPart(peer, s + 1, memory, segment.count * size), memory});
    }
  }
}

void AllReduce::ReduceSegment(const Segment& segment, uint32_t part,
                              const std::vector<const uint8_t*>& scattered,
                              size_t offset) {
  ProcessGroup& group = *operation_.group;
  const size_t bytes = segment.count * options_.element_bytes;
  std::vector<const void*> inputs(group.world_size());
  for (int peer = 0; peer < group.world_size(); ++peer) {
    if (peer != group.rank()) {
      exchange_.AwaitBytes(peer, offset + bytes, "reduce-scatter");
      inputs[peer] = scattered[peer] + offset;
    } else {
      inputs[peer] = Input(segment.begin);
    }
  }
  const uint8_t* sums = Output(segment.begin);
  Sum(segment, std::move(inputs));
  for (int step = 1; step < group.world_size(); ++step) {
    SendPart(group.PeerAfter(step), part, sums, bytes);
  }
}

void AllReduce::RunLarge() {
  ProcessGroup& group = *operation_.group;
  const Chunk own = ChunkOf(group.rank());
  std::vector<const uint8_t*> scattered(group.world_size());
  for (int peer = 0; peer < group.world_size(); ++peer) {
    if (peer != group.rank()) scattered[peer] = exchange_.Receive(peer);
  }
  for (size_t s = 0; s < own.segments; ++s) {
    ReduceSegment(SegmentOf(own, s), s + 1, scattered, s * kSegmentBytes);
  }
  for (int peer = 0; peer < group.world_size(); ++peer) {
    for (const Part& part : parts_[peer]) {
      AwaitPart(peer, part.message, "all-gather");
    }
  }
  exchange_.AwaitPayloads();
  exchange_.AwaitSent();
}

}  // namespace tfdist
