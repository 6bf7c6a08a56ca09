// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_ALL_REDUCE_H_
#define TFDIST_CUSTOM_OPS_COMM_ALL_REDUCE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "custom_ops/comm/all_reduce_form.h"
#include "custom_ops/comm/exchange.h"
#include "custom_ops/comm/operation.h"
#include "custom_ops/comm/sum_functor.h"

namespace tfdist {

// Sums `count` elements over all ranks, from `input` to `output`, which may be
// the same memory. Every rank gets the same bits, because each element is
// summed on one rank, or by all ranks in the same order. AllReduceChoice
// selects one of these forms, for n bytes on W ranks:
//
// Direct, small: every rank sends all its elements to every peer. Communication
// steps: 1. Bytes on the wire per rank: (W-1) n.
//
// Direct, large: a direct reduce-scatter, then an all-gather. The elements are
// divided into one *chunk* per rank, and chunks into *segments*. Every rank
// sends its elements of chunk j to rank j. Rank j sums one segment after
// another as they arrive, in rank order, and sends each sum to every peer at
// once, so that both phases overlap. Communication steps: 2. Bytes on the wire
// per rank: 2 (W-1)/W n.
//
// Ring: the same chunks pass from each rank to the next. Chunk j starts on rank
// j+1. Each rank adds its part and sends the partial sum on. Rank j completes
// the sum, which then passes around the ring once more. Before the first chunk,
// the ranks exchange headers to check that all do the same. Communication
// steps: 1 + 2 (W-1). Bytes on the wire per rank: as in the direct form, but
// all to the next rank. Where hosts have several ranks, only a small part of
// these bytes leaves the host.
//
// Tree: see TreeSteps. Communication steps: log2 W, and two more if W is not a
// power of two. Bytes on the wire per rank: n log2 W.
//
// In the ring and tree forms, 16-bit floats are sent as float until their sum
// is complete, so that the sum is rounded once in every form.
class AllReduce {
 public:
  struct Options {
    const void* input = nullptr;
    void* output = nullptr;
    size_t count = 0;
    size_t element_bytes = 0;
    int32_t dtype = 0;
    uint64_t shape_hash = 0;
    std::string shapes;  // for the error of a mismatch
    bool weighted = false;
    double weight = 1;
    size_t unweighted = 0;  // last elements, summed without weights

    size_t bytes() const { return count * element_bytes; }
  };

  AllReduce(Operation& operation, const Options& options);

  // Whether Post takes so little time that it may run on TensorFlow's thread.
  bool posts_inline() const;
  void SetError(const std::string& error) { exchange_.SetError(error); }
  void Post();
  void Run();

 private:
  struct Chunk {
    size_t begin = 0;  // elements
    size_t count = 0;
    size_t segments = 0;
  };
  // A range of elements.
  struct Segment {
    size_t begin = 0;
    size_t count = 0;
  };

  // Defined in all_reduce.cc.
  Header MakeHeader() const;
  void ReadWeights();
  void RunSmall();
  void PostLarge();
  void RunLarge();
  Chunk ChunkOf(int rank) const;
  Segment SegmentOf(const Chunk& chunk, size_t segment) const;
  const uint8_t* Input(size_t element) const;
  uint8_t* Output(size_t element) const;
  // The number of elements, of the first ones of a segment, that have weights.
  size_t WeightedCount(const Segment& segment) const;
  // Sums a segment of the ranks' inputs, which begin with it.
  void Sum(const Segment& segment, std::vector<const void*> inputs);
  // Computes a partial sum of a segment: `before`, if not null, and this rank's
  // input, times `weight` if that is not null.
  void AddInput(const Segment& segment, uint8_t* sums, const uint8_t* before,
                const float* weight) const;
  // Computes the output of a segment, `sums` times `scale` if not null.
  void Finish(const Segment& segment, const uint8_t* sums,
              const float* scale) const;
  void SendPart(int peer, uint32_t part, const void* data, size_t bytes);
  Incoming* ExpectPart(int peer, uint32_t part, void* memory, size_t bytes);
  void AwaitPart(int peer, Incoming* message, const char* stage);
  void ReduceSegment(const Segment& segment, uint32_t part,
                     const std::vector<const uint8_t*>& scattered,
                     size_t offset);

  // Defined in all_reduce_ring.cc.
  void RunRing();
  Chunk ChunkBefore(int steps) const;
  uint32_t RingPart(int step, size_t segment) const;
  void ExpectRing();
  const float* OwnWeight() const;
  const void* StartOfRing(const Segment& segment);
  void PassPartialSums(int step);
  void PassSums(int step);

  // Defined in all_reduce_tree.cc.
  void PostTree();
  void RunTree();
  void BeginTreeStep(size_t index);
  void EndTreeStep(size_t index);

  Operation& operation_;
  const Options options_;
  const SumFunction sum_;
  const PartialSum partial_;
  const AllReduceForm form_;
  const bool small_;  // the small direct form
  Exchange exchange_;
  std::vector<float> weights_;  // by rank; empty: plain sum
  float scale_ = 1;

  struct Part {
    Incoming* message;
    uint8_t* memory;
  };
  std::vector<std::vector<Part>> parts_;  // by peer, or by step of a ring

  std::vector<TreeStep> tree_;
  std::vector<std::unique_ptr<Exchange>> swaps_;  // by step of a tree
  // Sums over the ranks whose parts have arrived.
  const uint8_t* sums_ = nullptr;
  double total_weight_ = 0;  // sum of the weights of the same ranks
  std::string error_;        // errors of the same ranks
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_ALL_REDUCE_H_
