// SPDX-License-Identifier: Apache-2.0
// The tree form of all_reduce; see AllReduce and TreeSteps.
#include "custom_ops/comm/all_reduce.h"
#include "custom_ops/comm/process_group.h"
#include "custom_ops/common/message.h"

namespace tfdist {

// In the tree form, a rank receives messages from only some ranks. If one of
// the other ranks runs a different operation, this rank would wait until its
// timeout. So it also watches for the first message of the other forms, which
// is sent to all ranks. A rank that detects a difference sends this message
// itself. All ranks then compare all headers and name the same pair. An error
// is passed from rank to rank in place of a sum.
void AllReduce::PostTree() {
  exchange_.ExpectNone();
  std::shared_ptr<uint8_t> own =
      operation_.group->scratch().Acquire(options_.count * partial_.bytes);
  const auto weight = static_cast<float>(options_.weight);
  AddInput({0, options_.count}, own.get(), nullptr,
           options_.weighted ? &weight : nullptr);
  sums_ = own.get();
  operation_.Keep(std::move(own));
  total_weight_ = options_.weight;
  error_ = exchange_.error();
  tree_ = TreeSteps(operation_.group->rank(), operation_.group->world_size());
  BeginTreeStep(0);
}

void AllReduce::RunTree() {
  try {
    for (size_t step = 0; step < tree_.size(); ++step) {
      if (step > 0) BeginTreeStep(step);
      EndTreeStep(step);
    }
  } catch (const Operation::Stray&) {
    exchange_.SendToAll(nullptr, 0);
    exchange_.Disagree();
  }
  if (!error_.empty()) exchange_.Throw(error_);
  operation_.AwaitSent("send");
  if (options_.weighted) {
    const int world_size = operation_.group->world_size();
    scale_ =
        total_weight_ > 0 ? static_cast<float>(world_size / total_weight_) : 0;
  }
  Finish({0, options_.count}, sums_, options_.weighted ? &scale_ : nullptr);
}

void AllReduce::BeginTreeStep(size_t index) {
  const TreeStep& step = tree_[index];
  const size_t bytes = options_.count * partial_.bytes;
  Header header = MakeHeader();
  header.part = step.part;
  header.weight = total_weight_;
  swaps_.push_back(std::make_unique<Exchange>(operation_, header));
  Exchange& swap = *swaps_.back();
  if (!error_.empty()) swap.ForwardError(error_);
  swap.SetExpectedBytes(bytes);
  if (step.receives) swap.Expect(step.peer);
  if (step.sends) swap.Send(step.peer, sums_, bytes);
}

void AllReduce::EndTreeStep(size_t index) {
  const TreeStep& step = tree_[index];
  if (!step.receives) return;
  Exchange& swap = *swaps_[index];
  error_ = swap.AwaitAgreement();
  if (!error_.empty()) return;
  uint8_t* theirs = swap.Receive(step.peer);
  swap.AwaitPayloads();
  const double weight = swap.header(step.peer).weight;
  const bool result = !step.sends && index > 0;
  if (result) {
    total_weight_ = weight;
  } else {
    // The sums of the lower rank come first, so that both ranks get the same
    // bits.
    const bool lower = operation_.group->rank() < step.peer;
    const void* const both[] = {lower ? sums_ : theirs, lower ? theirs : sums_};
    partial_.sum(theirs, both, nullptr, 2, 1, options_.count);
    total_weight_ = lower ? total_weight_ + weight : weight + total_weight_;
  }
  sums_ = theirs;
}

}  // namespace tfdist
