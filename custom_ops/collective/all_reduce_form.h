// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_ALL_REDUCE_FORM_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_ALL_REDUCE_FORM_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tfdist {

// How an all_reduce is done; see AllReduce. The numbers are in its headers.
enum class AllReduceForm : int32_t { kDirect = 0, kRing = 1, kTree = 2 };

// "direct", "ring", "tree".
const char* FormName(int32_t form);
std::optional<AllReduceForm> FindForm(const std::string& name);

// Chooses the form of each all_reduce from its bytes and from which ranks share
// a host: the same on all ranks.
class AllReduceChoice {
 public:
  // `addresses` are "host:port" by rank; `form` is the one to take always.
  AllReduceChoice(const std::vector<std::string>& addresses,
                  std::optional<AllReduceForm> form);

  // Of so many bytes, where partial sums are `growth` times as large.
  AllReduceForm Choose(size_t bytes, size_t growth) const;
  // Whether the direct form sends all to all; see AllReduce.
  bool IsSmall(size_t bytes) const;
  // How many ranks the host of `rank` has.
  int Neighbours(int rank) const;

 private:
  // The host that sends most to others, in messages of one rank to one rank.
  struct Crossings {
    int direct = 0;  // if every rank sends one to every other
    int ring = 0;    // if every rank sends one to the next
    int tree = 0;    // if every rank sends one in each step of a tree
  };
  double Seconds(double steps, double messages, double memory,
                 double network) const;

  const int world_size_;
  const std::optional<AllReduceForm> form_;
  std::vector<int> hosts_;  // by rank
  Crossings crossings_;
};

// One step of a rank in the tree.
struct TreeStep {
  int peer;
  uint32_t part;  // of the messages
  bool sends, receives;
};

// Recursive doubling: in step i every rank swaps sums with the one whose number
// differs in bit i. Where the ranks are no power of two, some first hand theirs
// to a neighbour and get the result from it at the end.
std::vector<TreeStep> TreeSteps(int rank, int world_size);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_ALL_REDUCE_FORM_H_
