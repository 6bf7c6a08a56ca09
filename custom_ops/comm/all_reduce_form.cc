// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/all_reduce_form.h"

#include <algorithm>
#include <map>

namespace tfdist {

namespace {

constexpr const char* kNames[] = {"direct", "ring", "tree"};

// The cost model, in seconds and bytes. docs/decisions.md explains the numbers.
// A step is the time of one message, including the threads that it wakes.
constexpr double kStep = 50e-6;
constexpr double kStepOverNetwork = 100e-6;
constexpr double kMessage = 15e-6;   // for the sender and for the receiver
constexpr double kMemoryRate = 3e9;  // bytes per second of a rank, on one host
constexpr double kNetworkRate = 1.2e9;  // bytes per second of a host: 10 Gbit/s

// Links may be slower than the model assumes. So where a tree sends more bytes
// than another form, it must save a fifth of the time.
constexpr double kTreeShare = 0.8;

// The small direct form saves a step and messages, but costs extra bytes on the
// wire. It is used up to kSmallExtraBytes extra bytes, and, like the tree, only
// below kSmallBytes, because their sums do not overlap the transfer.
constexpr size_t kSmallExtraBytes = size_t{64} << 10;
constexpr size_t kSmallBytes = size_t{256} << 10;

}  // namespace

const char* FormName(int32_t form) {
  return form >= 0 && form < 3 ? kNames[form] : "unknown form";
}

std::optional<AllReduceForm> FindForm(const std::string& name) {
  for (int32_t form = 0; form < 3; ++form) {
    if (name == kNames[form]) return static_cast<AllReduceForm>(form);
  }
  return std::nullopt;
}

std::vector<TreeStep> TreeSteps(int rank, int world_size) {
  int doubling = 1;
  while (2 * doubling <= world_size) doubling *= 2;
  // Pairs of ranks that act as one rank.
  const int pairs = world_size - doubling;
  uint32_t last = 2;
  for (int bit = 1; bit < doubling; bit *= 2) ++last;
  const bool paired = rank < 2 * pairs;
  if (paired && rank % 2 == 1) {
    return {{rank - 1, 1, true, false}, {rank - 1, last, false, true}};
  }
  std::vector<TreeStep> steps;
  if (paired) steps.push_back({rank + 1, 1, false, true});
  const int place = paired ? rank / 2 : rank - pairs;
  uint32_t part = 2;
  for (int bit = 1; bit < doubling; bit *= 2) {
    const int other = place ^ bit;
    const int peer = other < pairs ? 2 * other : other + pairs;
    steps.push_back({peer, part++, true, true});
  }
  if (paired) steps.push_back({rank + 1, last, true, false});
  return steps;
}

AllReduceChoice::AllReduceChoice(const std::vector<std::string>& addresses,
                                 std::optional<AllReduceForm> form)
    : world_size_(static_cast<int>(addresses.size())), form_(form) {
  std::map<std::string, int> numbers;
  for (const std::string& address : addresses) {
    const std::string host = address.substr(0, address.rfind(':'));
    hosts_.push_back(
        numbers.emplace(host, static_cast<int>(numbers.size())).first->second);
  }
  std::vector<Crossings> by_host(numbers.size());
  for (int rank = 0; rank < world_size_; ++rank) {
    Crossings& mine = by_host[hosts_[rank]];
    const auto crosses = [&](int peer) {
      return hosts_[peer] != hosts_[rank] ? 1 : 0;
    };
    for (int peer = 0; peer < world_size_; ++peer) mine.direct += crosses(peer);
    mine.ring += crosses((rank + 1) % world_size_);
    for (const TreeStep& step : TreeSteps(rank, world_size_)) {
      mine.tree += step.sends ? crosses(step.peer) : 0;
    }
  }
  for (const Crossings& host : by_host) {
    crossings_.direct = std::max(crossings_.direct, host.direct);
    crossings_.ring = std::max(crossings_.ring, host.ring);
    crossings_.tree = std::max(crossings_.tree, host.tree);
  }
}

int AllReduceChoice::Neighbours(int rank) const {
  return static_cast<int>(
      std::count(hosts_.begin(), hosts_.end(), hosts_[rank]));
}

bool AllReduceChoice::IsSmall(size_t bytes) const {
  // (W-1) n - 2 (W-1)/W n. Two ranks send the same bytes in both direct forms.
  const size_t extra =
      bytes * (world_size_ - 1) * (world_size_ - 2) / world_size_;
  return bytes < kSmallBytes && extra <= kSmallExtraBytes;
}

double AllReduceChoice::Seconds(double steps, double messages, double memory,
                                double network) const {
  const double step = crossings_.direct > 0 ? kStepOverNetwork : kStep;
  return steps * step + messages * kMessage +
         std::max(memory / kMemoryRate, network / kNetworkRate);
}

AllReduceForm AllReduceChoice::Choose(size_t bytes, size_t growth) const {
  if (form_.has_value()) return *form_;
  const double ranks = world_size_, n = static_cast<double>(bytes);
  const double chunk = n / ranks;
  const double partial = n * static_cast<double>(growth);
  const double others = ranks - 1;
  const bool small = IsSmall(bytes);
  const double sent = small ? others * n : 2 * others * chunk;
  const double direct =
      small ? Seconds(1, others, sent, crossings_.direct * n)
            : Seconds(2, 2 * others, sent, 2 * crossings_.direct * chunk);
  // Half of the chunks in the ring are partial sums.
  const double round = others * (chunk + partial / ranks);
  const double ring =
      Seconds(1 + 2 * others, 3 * others, round, crossings_.ring * round);
  const double steps = static_cast<double>(TreeSteps(0, world_size_).size());
  const double tree_sent = steps * partial;
  const double tree =
      Seconds(steps, steps, tree_sent, crossings_.tree * partial);
  const auto pays = [&](double seconds, double bytes_sent) {
    return tree < (tree_sent > bytes_sent ? kTreeShare : 1) * seconds;
  };
  if (bytes < kSmallBytes && pays(direct, sent) && pays(ring, round)) {
    return AllReduceForm::kTree;
  }
  return ring < direct ? AllReduceForm::kRing : AllReduceForm::kDirect;
}

}  // namespace tfdist
