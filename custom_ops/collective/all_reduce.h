// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_ALL_REDUCE_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_ALL_REDUCE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "custom_ops/collective/exchange.h"
#include "custom_ops/collective/operation.h"
#include "custom_ops/collective/sum_functor.h"

namespace tfdist {

// The sum over ranks of `count` elements from `input` to `output`, which may be
// the same memory. Every rank gets the same bits: each element is summed on one
// rank, or by all in the same order.
//
// Small: everyone sends all to everyone. Communication steps: 1. Bytes on the
// wire per rank: (W-1) n.
//
// Large: a direct reduce-scatter, then an all-gather. The elements are divided
// into one *chunk* per rank, and chunks into *segments*. Everyone sends chunk j
// to rank j; rank j sums segment after segment, as they come, in rank order,
// and sends each sum to everyone at once, so both phases overlap. Communication
// steps: 2. Bytes on the wire per rank: 2 (W-1)/W n.
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
  };

  AllReduce(Operation& operation, const Options& options);

  static bool IsSmall(size_t bytes, int world_size);

  void SetError(const std::string& error) { exchange_.SetError(error); }
  void Post();
  void Run();

 private:
  struct Chunk {
    size_t begin = 0;  // bytes
    size_t bytes = 0;
    size_t segments = 0;
  };

  void ReadWeights();
  void RunSmall();
  void RunLarge();
  Chunk ChunkOf(int rank) const;
  size_t SegmentBytes(const Chunk& chunk, size_t segment) const;
  void ExpectReduced();
  void AwaitReduced();
  void ReduceSegment(const Chunk& own, size_t segment,
                     const std::vector<const uint8_t*>& scattered);

  Operation& operation_;
  const Options options_;
  const SumFunction sum_;
  const bool small_;
  Exchange exchange_;
  std::vector<std::vector<Incoming*>> reduced_;  // by peer and segment
  std::vector<float> weights_;                   // empty: plain sum
  float scale_ = 1;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_ALL_REDUCE_H_
