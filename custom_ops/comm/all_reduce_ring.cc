// SPDX-License-Identifier: Apache-2.0
// The ring form of all_reduce; see AllReduce.
#include "custom_ops/comm/all_reduce.h"
#include "custom_ops/comm/process_group.h"

namespace tfdist {

// In step s, counted from 1, a rank receives the chunk of the rank s + 1 before
// it, summed over the ranks in between. It adds its own part and sends the
// chunk in step s + 1. In step W - 1 its own chunk is complete. In step W - 1 +
// s it receives the sums of the rank s before it.
void AllReduce::RunRing() {
  const int world_size = operation_.group->world_size();
  ExpectRing();
  const Chunk first = ChunkBefore(1);
  for (size_t s = 0; s < first.segments; ++s) {
    const Segment segment = SegmentOf(first, s);
    SendPart(operation_.group->PeerAfter(1), RingPart(1, s),
             StartOfRing(segment), segment.count * partial_.bytes);
  }
  for (int step = 1; step < world_size; ++step) PassPartialSums(step);
  for (int step = 1; step < world_size; ++step) PassSums(step);
  operation_.AwaitSent("send");
}

AllReduce::Chunk AllReduce::ChunkBefore(int steps) const {
  const int world_size = operation_.group->world_size();
  return ChunkOf((operation_.group->rank() + world_size - steps) % world_size);
}

uint32_t AllReduce::RingPart(int step, size_t segment) const {
  const Chunk last =
      ChunkOf(operation_.group->world_size() - 1);  // the longest chunk
  return static_cast<uint32_t>(1 + step * (last.segments + 1) + segment);
}

void AllReduce::ExpectRing() {
  const int world_size = operation_.group->world_size();
  const int peer = operation_.group->PeerBefore(1);
  size_t count = 0;
  for (int step = 1; step < world_size; ++step) {
    count += ChunkBefore(step + 1).count;
  }
  std::shared_ptr<uint8_t> memory =
      operation_.group->scratch().Acquire(count * partial_.bytes);
  uint8_t* place = memory.get();
  operation_.Keep(std::move(memory));
  parts_.resize(2 * world_size - 1);
  for (int step = 1; step < 2 * world_size - 1; ++step) {
    const bool whole = step >= world_size;
    const Chunk chunk = ChunkBefore(whole ? step - world_size + 1 : step + 1);
    for (size_t s = 0; s < chunk.segments; ++s) {
      const Segment segment = SegmentOf(chunk, s);
      uint8_t* to = whole ? Output(segment.begin) : place;
      const size_t bytes =
          segment.count * (whole ? options_.element_bytes : partial_.bytes);
      if (!whole) place += bytes;
      parts_[step].push_back(
          {ExpectPart(peer, RingPart(step, s), to, bytes), to});
    }
  }
}

const float* AllReduce::OwnWeight() const {
  return weights_.empty() ? nullptr : &weights_[operation_.group->rank()];
}

// Returns this rank's part of a segment as a partial sum.
const void* AllReduce::StartOfRing(const Segment& segment) {
  if (weights_.empty() && partial_.bytes == options_.element_bytes) {
    return Input(segment.begin);
  }
  std::shared_ptr<uint8_t> memory =
      operation_.group->scratch().Acquire(segment.count * partial_.bytes);
  AddInput(segment, memory.get(), nullptr, OwnWeight());
  operation_.Keep(memory);
  return memory.get();
}

void AllReduce::PassPartialSums(int step) {
  ProcessGroup& group = *operation_.group;
  const bool whole = step == group.world_size() - 1;
  const Chunk chunk = ChunkBefore((step + 1) % group.world_size());
  for (size_t s = 0; s < chunk.segments; ++s) {
    const Segment segment = SegmentOf(chunk, s);
    const Part& part = parts_[step][s];
    AwaitPart(group.PeerBefore(1), part.message, "reduce-scatter");
    AddInput(segment, part.memory, part.memory, OwnWeight());
    const uint8_t* sums = part.memory;
    size_t bytes = segment.count * partial_.bytes;
    if (whole) {
      Finish(segment, sums, weights_.empty() ? nullptr : &scale_);
      sums = Output(segment.begin);
      bytes = segment.count * options_.element_bytes;
    }
    SendPart(group.PeerAfter(1), RingPart(step + 1, s), sums, bytes);
  }
}

void AllReduce::PassSums(int step) {
  ProcessGroup& group = *operation_.group;
  const int place = group.world_size() - 1 + step;
  const Chunk chunk = ChunkBefore(step);
  for (size_t s = 0; s < chunk.segments; ++s) {
    const Part& part = parts_[place][s];
    AwaitPart(group.PeerBefore(1), part.message, "all-gather");
    if (step == group.world_size() - 1) continue;
    SendPart(group.PeerAfter(1), RingPart(place + 1, s), part.memory,
             SegmentOf(chunk, s).count * options_.element_bytes);
  }
}

}  // namespace tfdist
