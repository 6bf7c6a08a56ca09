// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/collective/all_reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "custom_ops/collective/process_group.h"
#include "custom_ops/common/message.h"

namespace tfdist {

namespace {

// The small form saves a one-way trip, some 50 us, and messages, and costs
// bytes on the wire: so many are worth it. It is not worth an unpipelined sum
// of more.
constexpr size_t kSmallExtraBytes = size_t{64} << 10;
constexpr size_t kSmallBytes = size_t{256} << 10;
constexpr size_t kSegmentBytes = size_t{512} << 10;

Header MakeHeader(const AllReduce::Options& options) {
  Header header;
  header.dtype = options.dtype;
  header.agreed = options.count * options.element_bytes;
  header.shape_hash = options.shape_hash;
  header.weight = options.weight;
  if (options.weighted) header.flags |= kWeightedFlag;
  SetText(header.shapes, options.shapes.c_str());
  return header;
}

}  // namespace

AllReduce::AllReduce(Operation& operation, const Options& options)
    : operation_(operation),
      options_(options),
      sum_(FindSum(static_cast<tensorflow::DataType>(options.dtype))),
      small_(IsSmall(options.count * options.element_bytes,
                     operation.group->world_size())),
      exchange_(operation, MakeHeader(options)) {}

bool AllReduce::IsSmall(size_t bytes, int world_size) {
  // (W-1) n - 2 (W-1)/W n; two ranks send the same either way.
  const size_t extra = bytes * (world_size - 1) * (world_size - 2) / world_size;
  return bytes < kSmallBytes && extra <= kSmallExtraBytes;
}

void AllReduce::Post() {
  exchange_.ExpectAll();
  exchange_.SetExpectedBytes(small_ ? options_.count * options_.element_bytes
                                    : ChunkOf(operation_.group->rank()).bytes);
  if (small_) {
    exchange_.SendToAll(options_.input,
                        options_.count * options_.element_bytes);
    return;
  }
  const auto* input = static_cast<const uint8_t*>(options_.input);
  for (int step = 1; step < operation_.group->world_size(); ++step) {
    const int peer = operation_.group->PeerAfter(step);
    const Chunk theirs = ChunkOf(peer);
    exchange_.Send(peer, input + theirs.begin, theirs.bytes);
  }
  ExpectReduced();
}

void AllReduce::Run() {
  exchange_.AwaitHeaders();
  if (options_.weighted) ReadWeights();
  if (small_) {
    RunSmall();
  } else {
    RunLarge();
  }
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
  // The common case, full batches everywhere, is a plain sum.
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
  sum_(options_.output, inputs.data(),
       weights_.empty() ? nullptr : weights_.data(), world_size, scale_,
       options_.count);
}

AllReduce::Chunk AllReduce::ChunkOf(int rank) const {
  const int world_size = operation_.group->world_size();
  // Whole cache lines, so that no line is written by two phases at once.
  const size_t unit = 64 / options_.element_bytes;
  const size_t units = (options_.count + unit - 1) / unit;
  const auto boundary = [&](size_t r) {
    return std::min(units * r / world_size * unit, options_.count);
  };
  Chunk chunk;
  chunk.begin = boundary(rank) * options_.element_bytes;
  chunk.bytes = boundary(rank + 1) * options_.element_bytes - chunk.begin;
  chunk.segments = (chunk.bytes + kSegmentBytes - 1) / kSegmentBytes;
  return chunk;
}

size_t AllReduce::SegmentBytes(const Chunk& chunk, size_t segment) const {
  return std::min(kSegmentBytes, chunk.bytes - segment * kSegmentBytes);
}

// Into the output, which may be the input: what a peer has summed has left.
void AllReduce::ExpectReduced() {
  auto* output = static_cast<uint8_t*>(options_.output);
  reduced_.resize(operation_.group->world_size());
  for (int step = 1; step < operation_.group->world_size(); ++step) {
    const int peer = operation_.group->PeerBefore(step);
    const Chunk theirs = ChunkOf(peer);
    for (size_t s = 0; s < theirs.segments; ++s) {
      Incoming* message = operation_.Expect(peer, s + 1);
      operation_.Give(peer, message, output + theirs.begin + s * kSegmentBytes,
                      SegmentBytes(theirs, s));
      reduced_[peer].push_back(message);
    }
  }
}

void AllReduce::ReduceSegment(const Chunk& own, size_t segment,
                              const std::vector<const uint8_t*>& scattered) {
  const int world_size = operation_.group->world_size();
  const int rank = operation_.group->rank();
  const size_t bytes = SegmentBytes(own, segment);
  const size_t offset = segment * kSegmentBytes;
  std::vector<const void*> inputs(world_size);
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer != rank) {
      exchange_.AwaitBytes(peer, offset + bytes, "reduce-scatter");
      inputs[peer] = scattered[peer] + offset;
    } else {
      inputs[peer] =
          static_cast<const uint8_t*>(options_.input) + own.begin + offset;
    }
  }
  uint8_t* sums = static_cast<uint8_t*>(options_.output) + own.begin + offset;
  sum_(sums, inputs.data(), weights_.empty() ? nullptr : weights_.data(),
       world_size, scale_, bytes / options_.element_bytes);
  Header header = MakeHeader(options_);
  header.part = segment + 1;
  header.bytes = bytes;
  for (int step = 1; step < world_size; ++step) {
    operation_.Send(operation_.group->PeerAfter(step), header, sums);
  }
}

void AllReduce::RunLarge() {
  const int rank = operation_.group->rank();
  const int world_size = operation_.group->world_size();
  const Chunk own = ChunkOf(rank);
  std::vector<const uint8_t*> scattered(world_size);
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer != rank) scattered[peer] = exchange_.Receive(peer);
  }
  for (size_t s = 0; s < own.segments; ++s) ReduceSegment(own, s, scattered);
  AwaitReduced();
  exchange_.AwaitPayloads();
  exchange_.AwaitSent();
}

void AllReduce::AwaitReduced() {
  for (size_t peer = 0; peer < reduced_.size(); ++peer) {
    for (Incoming* message : reduced_[peer]) {
      operation_.AwaitHeader(peer, message, "all-gather");
      operation_.AwaitBytes(peer, message, message->header.bytes, "all-gather");
    }
  }
}

}  // namespace tfdist
