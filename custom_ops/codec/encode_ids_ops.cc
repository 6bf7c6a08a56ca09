// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "custom_ops/codec/entry_builder.h"
#include "custom_ops/codec/id_lists.h"
#include "custom_ops/codec/message_builder.h"
#include "custom_ops/codec/message_header.h"
#include "custom_ops/codec/placement_plan.h"
#include "custom_ops/common/parallel_tasks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>EncodeIds")
    .Input("ids: L * Tids")
    .Input("row_splits: L * int64")
    .Input("weights: L * float")
    .Input("samples: float")
    .Output("payload: uint8")
    .Output("send_splits: int64")
    .Output("sample_ids: int32")
    .Output("sample_splits: int64")
    .Attr("L: int >= 1")
    .Attr("Tids: {int32, int64}")
    .Attr("rank: int >= 0")
    .Attr("world_size: int >= 1")
    .Attr("features: list(string)")
    .Attr("vocabulary_sizes: list(int)")
    .Attr("dims: list(int)")
    .Attr("row_parts: list(int)")
    .Attr("column_parts: list(int)")
    .Attr("ranks: list(int)")
    .Attr("list_features: list(int)")
    .Attr("out_of_range: list({'error', 'ignore'})")
    .Attr("unique: list(bool)")
    .Attr("in_blocks: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      int64_t world_size;
      std::vector<std::string> features;
      TF_RETURN_IF_ERROR(c->GetAttr("world_size", &world_size));
      TF_RETURN_IF_ERROR(c->GetAttr("features", &features));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(world_size));
      c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(3, c->Matrix(world_size, features.size()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Encodes the ids of this rank's samples for the ranks that own their rows.

For each sample and feature, merges all lists and combines duplicates by summing
their weights. The result is compressed into one section per part of the table's
rows. The message to a rank contains the sections of all features of which this
rank owns a cell. An invalid id of a feature with out_of_range "error" becomes
an error record, which DecodeIds raises on all ranks.

ids: L lists of ids, each [n_i].
row_splits: L vectors of offsets, each [b_i + 1]. Ids of sample s in list i are
  ids[i][row_splits[i][s] : row_splits[i][s + 1]].
weights: L vectors, each [n_i], or [0] if all weights are 1.
samples: scalar, weight of this rank in the batch mean. Sent with the ids.
payload: messages to all ranks, ordered by receiver.
send_splits: [world_size], bytes of the message to each rank.
sample_ids: for each rank and feature, in this order, the samples with ids in
  the section.
sample_splits: [world_size, features], number of these samples.
features: F names, for error messages.
vocabulary_sizes, dims: rows and columns of the table of each feature.
row_parts, column_parts, ranks: placements. Cell (i, j) of the table of feature
  f is on rank i * column_parts[f] + j of the ranks of f. `ranks` concatenates
  the ranks of all features.
list_features: index of the feature of each list, ascending. Each feature has at
  least one list.
out_of_range: for each feature, the policy for invalid ids.
unique: for each feature, whether each sample has exactly one id, and the ids
  are strictly ascending over the samples.
in_blocks: whether to divide sections into blocks that can be decoded
  independently, for decoding on a GPU.
)doc");

// Minimum number of ids that make a second thread worthwhile.
constexpr int64_t kIdsPerTask = 16384;
constexpr int64_t kNanosecondsPerId = 10;

template <typename Tids>
class EncodeIdsOp : public OpKernel {
 public:
  explicit EncodeIdsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, plan_.Read(ctx));
    OP_REQUIRES_OK(ctx, plan_.ReadRank(ctx, &rank_));
    const size_t features = plan_.features().size();
    std::vector<int64_t> list_features;
    std::vector<std::string> out_of_range;
    std::vector<bool> unique;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("list_features", &list_features));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("out_of_range", &out_of_range));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("unique", &unique));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("in_blocks", &in_blocks_));
    OP_REQUIRES(ctx,
                out_of_range.size() == features && unique.size() == features,
                InvalidArgument("Attributes out_of_range and unique must "
                                "have an element per feature. Received: ",
                                out_of_range.size(), " and ", unique.size(),
                                ", ", features, " features"));
    for (size_t f = 0; f < features; ++f) {
      rules_.push_back({out_of_range[f] == "ignore", unique[f]});
    }
    FindLists(ctx, list_features);
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<IdLists<Tids>> lists(rules_.size());
    const IdInputs inputs(ctx);
    for (size_t f = 0; f < lists.size(); ++f) {
      OP_REQUIRES_OK(ctx, ReadIdLists(inputs, first_list_[f],
                                      first_list_[f + 1], &lists[f]));
    }
    const Tensor* samples;
    OP_REQUIRES_OK(ctx, ctx->input("samples", &samples));
    OP_REQUIRES(ctx, samples->NumElements() == 1,
                InvalidArgument("samples must be a scalar. Received shape: ",
                                samples->shape().DebugString()));
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    std::vector<FeatureEntries> entries = BuildEntries(lists, pool);
    OP_REQUIRES_OK(ctx, CheckPromises(entries));
    MessageHeader header;
    header.rank = rank_;
    header.samples = *static_cast<const float*>(samples->data());
    header.bad_id = FirstBadId(entries);
    MessageBuilder messages(plan_, entries, header, in_blocks_, pool);
    messages.Code();
    OP_REQUIRES_OK(ctx, messages.WritePayload(ctx));
    OP_REQUIRES_OK(ctx, messages.WriteSamples(ctx));
  }

 private:
  // Computes the first list of each feature from the feature of each list.
  void FindLists(OpKernelConstruction* ctx,
                 const std::vector<int64_t>& list_features) {
    int lists;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("L", &lists));
    bool valid = static_cast<int>(list_features.size()) == lists;
    for (int i = 0; valid && i < lists; ++i) {
      const int64_t feature = list_features[i];
      const int64_t known = first_list_.size();
      if (feature == known) first_list_.push_back(i);
      valid = feature == known || (known > 0 && feature == known - 1);
    }
    OP_REQUIRES(ctx, valid && first_list_.size() == rules_.size(),
                InvalidArgument("Attribute list_features must ascend over all ",
                                rules_.size(),
                                " features, one element for "
                                "each of the ",
                                lists, " lists"));
    first_list_.push_back(lists);
  }

  static int64_t Ranges(const IdLists<Tids>& lists, int64_t most,
                        int64_t threads) {
    return std::max(
        {std::min({lists.ids / kIdsPerTask, lists.samples, threads}),
         (lists.samples + most - 1) / most, int64_t{1}});
  }

  // Runs one task per range of samples of one feature.
  std::vector<FeatureEntries> BuildEntries(
      const std::vector<IdLists<Tids>>& lists,
      tensorflow::thread::ThreadPool* pool) const {
    std::vector<FeatureEntries> entries(lists.size());
    std::vector<std::pair<size_t, size_t>> tasks;
    int64_t ids = 0;
    for (size_t f = 0; f < lists.size(); ++f) {
      const EntryBuilder builder(plan_.features()[f], rules_[f]);
      const int64_t ranges =
          Ranges(lists[f], builder.MaxSamples(), pool->NumThreads());
      for (int64_t i = 0; i < ranges; ++i) {
        entries[f].ranges.emplace_back(plan_.features()[f], rules_[f]);
        tasks.emplace_back(f, i);
      }
      ids += lists[f].ids;
    }
    const int64_t count = tasks.size();
    ParallelUnits(pool, count,
                  kNanosecondsPerId * (ids / std::max<int64_t>(count, 1) + 1),
                  [&](int64_t first, int64_t last) {
                    for (int64_t task = first; task < last; ++task) {
                      const auto [f, i] = tasks[task];
                      const int64_t samples = lists[f].samples;
                      const int64_t ranges = entries[f].ranges.size();
                      entries[f].ranges[i].Build(lists[f], samples * i / ranges,
                                                 samples * (i + 1) / ranges);
                    }
                  });
    for (size_t f = 0; f < lists.size(); ++f) {
      entries[f].unique = rules_[f].unique;
      for (const EntryBuilder& range : entries[f].ranges) {
        entries[f].weighted |= range.has_weights();
      }
    }
    return entries;
  }

  absl::Status CheckPromises(const std::vector<FeatureEntries>& entries) const {
    for (size_t f = 0; f < entries.size(); ++f) {
      for (const EntryBuilder& range : entries[f].ranges) {
        if (range.keeps_promise()) continue;
        return InvalidArgument(
            "Layer '", plan_.features()[f].name,
            "': under unique every sample must have one id, and these must "
            "ascend strictly from sample to sample, in one list");
      }
    }
    return absl::OkStatus();
  }

  static BadId FirstBadId(const std::vector<FeatureEntries>& entries) {
    for (size_t f = 0; f < entries.size(); ++f) {
      for (const EntryBuilder& range : entries[f].ranges) {
        if (!range.bad_id().found) continue;
        BadId bad_id = range.bad_id();
        bad_id.feature = f;
        return bad_id;
      }
    }
    return {};
  }

  PlacementPlan plan_;
  int64_t rank_ = 0;
  bool in_blocks_ = false;
  std::vector<FeatureRules> rules_;
  // First list of each feature; the last element is the number of lists.
  std::vector<int> first_list_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>EncodeIds")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<int32_t>("Tids"),
                        EncodeIdsOp<int32_t>);
REGISTER_KERNEL_BUILDER(Name("Tfdist>EncodeIds")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<int64_t>("Tids"),
                        EncodeIdsOp<int64_t>);

}  // namespace
}  // namespace tfdist
