// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_ALL_REDUCE_FORM_H_
#define TFDIST_CUSTOM_OPS_COMM_ALL_REDUCE_FORM_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tfdist {

// The algorithm of an all_reduce; see AllReduce. The numbers are part of the
// message headers.
enum class AllReduceForm : int32_t { kDirect = 0, kRing = 1, kTree = 2 };

// Returns "direct", "ring" or "tree".
const char* FormName(int32_t form);
std::optional<AllReduceForm> FindForm(const std::string& name);

// Chooses the form of each all_reduce from its size and from which ranks share
// a host. The choice is the same on all ranks.
class AllReduceChoice {
 public:
  // `addresses`: "host:port" of each rank. `form`: if set, the form of every
  // all_reduce.
  AllReduceChoice(const std::vector<std::string>& addresses,
                  std::optional<AllReduceForm> form);

  // Returns the form for `bytes` bytes, whose partial sums take `growth` times
  // as many bytes.
  AllReduceForm Choose(size_t bytes, size_t growth) const;
  // Whether the direct form sends all elements to every peer; see AllReduce.
  bool IsSmall(size_t bytes) const;
  // Returns the number of ranks on the host of `rank`.
  int Neighbours(int rank) const;

 private:
  // For each form, the number of messages that the busiest host sends to other
  // hosts.
  struct Crossings {
    int direct = 0;  // if every rank sends one message to every peer
    int ring = 0;    // if every rank sends one message to the next rank
    int tree = 0;    // if every rank sends one message in each step of a tree
  };
  double Seconds(double steps, double messages, double memory,
                 double network) const;

  const int world_size_;
  const std::optional<AllReduceForm> form_;
  std::vector<int> hosts_;  // by rank
  Crossings crossings_;
};

// One step of a rank in the tree form.
struct TreeStep {
  int peer;
  uint32_t part;  // part of the messages of this step
  bool sends, receives;
};

// Recursive doubling: in step i, every rank swaps sums with the rank whose
// number differs in bit i. If the number of ranks is not a power of two, some
// ranks first send their elements to an adjacent rank and receive the result
// from it at the end.
std::vector<TreeStep> TreeSteps(int rank, int world_size);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_ALL_REDUCE_FORM_H_
