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
// Segments a peer may send ahead of the sum.
constexpr size_t kWindow = 4;

Header MakeHeader(const AllReduce::Options& options) {
  Header header;
  header.dtype = options.dtype;
  header.agreed = options.count * options.element_bytes;
  header.shape_hash = options.shape_hash;
  header.weight = options.weight;
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
  if (small_) {
    exchange_.SendToAll(options_.input,
                        options_.count * options_.element_bytes);
    return;
  }
  const auto* input = static_cast<const uint8_t*>(options_.input);
  for (int step = 1; step < operation_.group->world_size(); ++step) {
    const int peer = operation_.group->PeerAfter(step);
    const Chunk theirs = ChunkOf(peer);
    exchange_.Send(peer, input + theirs.begin, SegmentBytes(theirs, 0));
  }
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
  const size_t bytes = options_.count * options_.element_bytes;
  std::vector<const void*> inputs(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    inputs[rank] = rank == operation_.group->rank() ? options_.input
                                                    : Payload(rank, bytes);
  }
  exchange_.AwaitPayloads();
  exchange_.AwaitSent();  // the output may be the memory that is being sent
  sum_(options_.output, inputs.data(),
       weights_.empty() ? nullptr : weights_.data(), world_size, scale_,
       options_.count);
  exchange_.Finish();
}

const uint8_t* AllReduce::Payload(int peer, size_t bytes) {
  if (const uint8_t* payload = exchange_.InFrame(peer)) return payload;
  std::shared_ptr<uint8_t> memory = operation_.group->scratch().Acquire(bytes);
  operation_.Keep(memory);
  exchange_.ReceiveInto(peer, memory.get());
  return memory.get();
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

// The buffers of both phases by peer; null at this rank's own place.
struct AllReduce::Phases {
  explicit Phases(int world_size)
      : scatter_out(world_size),
        scatter_in(world_size),
        gather_out(world_size),
        gather_in(world_size),
        first(world_size),
        window(world_size) {}
  std::vector<Buffer*> scatter_out, scatter_in, gather_out, gather_in;
  std::vector<const uint8_t*> first;  // segments
  std::vector<uint8_t*> window;       // of kWindow segments per peer
  Chunk own;
};

void AllReduce::PostScatter(Phases& phases) {
  const int world_size = operation_.group->world_size();
  const int rank = operation_.group->rank();
  auto* input = static_cast<uint8_t*>(const_cast<void*>(options_.input));
  auto* output = static_cast<uint8_t*>(options_.output);
  phases.own = ChunkOf(rank);
  // Nothing comes after the first of a single segment.
  const size_t window =
      phases.own.segments > 1
          ? std::min(phases.own.segments, kWindow) * kSegmentBytes
          : 0;
  for (int step = 1; step < world_size; ++step) {
    const int peer = operation_.group->PeerAfter(step);
    const Chunk theirs = ChunkOf(peer);
    phases.first[peer] = Payload(peer, SegmentBytes(phases.own, 0));
    std::shared_ptr<uint8_t> memory =
        operation_.group->scratch().Acquire(std::max<size_t>(window, 1));
    operation_.Keep(memory);
    phases.window[peer] = memory.get();
    phases.scatter_in[peer] = operation_.MakeBuffer(memory.get(), window);
    phases.scatter_out[peer] =
        operation_.MakeBuffer(input + theirs.begin, theirs.bytes);
    phases.gather_in[peer] =
        operation_.MakeBuffer(output + theirs.begin, theirs.bytes);
    phases.gather_out[peer] =
        operation_.MakeBuffer(output + phases.own.begin, phases.own.bytes);
    for (size_t s = 1; s < std::min(phases.own.segments, kWindow); ++s) {
      operation_.PostReceive(phases.scatter_in[peer], peer, Stream::kRest,
                             s * kSegmentBytes, SegmentBytes(phases.own, s));
    }
    for (size_t s = 0; s < theirs.segments; ++s) {
      operation_.PostReceive(phases.gather_in[peer], peer, Stream::kReduced,
                             s * kSegmentBytes, SegmentBytes(theirs, s));
    }
    for (size_t s = 1; s < theirs.segments; ++s) {
      operation_.PostSend(phases.scatter_out[peer], peer, Stream::kRest,
                          s * kSegmentBytes, SegmentBytes(theirs, s));
    }
  }
}

void AllReduce::ReduceSegment(Phases& phases, size_t segment) {
  const int world_size = operation_.group->world_size();
  const int rank = operation_.group->rank();
  const size_t bytes = SegmentBytes(phases.own, segment);
  const size_t offset = segment * kSegmentBytes;
  const size_t place = segment % kWindow * kSegmentBytes;
  std::vector<const void*> inputs(world_size);
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank) {
      inputs[peer] = static_cast<const uint8_t*>(options_.input) +
                     phases.own.begin + offset;
      continue;
    }
    if (segment == 0) {
      inputs[peer] = phases.first[peer];
      continue;
    }
    operation_.WaitReceive(phases.scatter_in[peer], peer, "reduce-scatter");
    operation_.bytes_received += bytes;
    operation_.group->CountReceived(bytes);
    inputs[peer] = phases.window[peer] + place;
  }
  sum_(static_cast<uint8_t*>(options_.output) + phases.own.begin + offset,
       inputs.data(), weights_.empty() ? nullptr : weights_.data(), world_size,
       scale_, bytes / options_.element_bytes);
  for (int step = 1; step < world_size; ++step) {
    const int peer = operation_.group->PeerAfter(step);
    operation_.PostSend(phases.gather_out[peer], peer, Stream::kReduced, offset,
                        bytes);
    if (segment + kWindow < phases.own.segments) {
      operation_.PostReceive(phases.scatter_in[peer], peer, Stream::kRest,
                             place,
                             SegmentBytes(phases.own, segment + kWindow));
    }
  }
}

void AllReduce::RunLarge() {
  const int world_size = operation_.group->world_size();
  Phases phases(world_size);
  PostScatter(phases);
  exchange_.AwaitPayloads();
  for (size_t s = 0; s < phases.own.segments; ++s) ReduceSegment(phases, s);
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == operation_.group->rank()) continue;
    const Chunk theirs = ChunkOf(peer);
    for (size_t s = 0; s < theirs.segments; ++s) {
      operation_.WaitReceive(phases.gather_in[peer], peer, "all-gather");
      if (s == 0) continue;  // the exchange waits for it
      operation_.WaitSend(phases.scatter_out[peer], peer, "reduce-scatter");
    }
    operation_.bytes_received += theirs.bytes;
    operation_.group->CountReceived(theirs.bytes);
    for (size_t s = 0; s < phases.own.segments; ++s) {
      operation_.WaitSend(phases.gather_out[peer], peer, "all-gather");
    }
  }
  exchange_.Finish();
}

}  // namespace tfdist
