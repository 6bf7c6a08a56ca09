// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/vocabulary/vocabulary.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::core::RefCountPtr;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

// Rows are 32-bit numbers, and row 0 is shared.
constexpr int64_t kMostCapacity = std::numeric_limits<int32_t>::max() - 1;
constexpr int64_t kMostBuckets = 1 << 20;

HashKey HashKeyOf(const Tensor& words) {
  const auto values = words.vec<int64_t>();
  return {{static_cast<uint64_t>(values(0)), static_cast<uint64_t>(values(1))}};
}

absl::Status CheckHashKey(const Tensor& words) {
  if (words.dims() == 1 && words.dim_size(0) == 2) return absl::OkStatus();
  return InvalidArgument("hash_key must be [2]. Received shape: ",
                         words.shape().DebugString());
}

REGISTER_OP("Tfdist>Vocabulary")
    .Input("hash_key: int64")
    .Output("vocabulary: resource")
    .Attr("table: string")
    .Attr("capacity: int >= 1")
    .Attr("buckets: int >= 1")
    .Attr("words: int >= 1 = 1")
    .Attr("min_count: int >= 1 = 1")
    .Attr("evict: {'none', 'lru', 'lfu'} = 'none'")
    .Attr("steps_to_live: int >= 0 = 0")
    .Attr("full: {'error', 'shared_row'} = 'error'")
    .Attr("unadmitted: {'zeros', 'shared_row'} = 'zeros'")
    .Attr("rank: int >= 0 = 0")
    .Attr("world_size: int >= 1 = 1")
    .Attr("first_rank: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Creates an empty vocabulary, which maps keys to rows of a table.

hash_key: [2], secret key of the hash, the same on all ranks; see hash_key.h.
vocabulary: reference-counted handle.
table: name of the table, for error messages.
capacity: limit of the number of keys with rows.
buckets: number of buckets of the hash table, a power of two; see vocabulary.h.
words: 64-bit words per key: 1 for ids, 2 for fingerprints.
min_count: number of occurrences after which a key is admitted.
evict: which keys are evicted when no row is free: none, the least recently used
  or the least frequently used.
steps_to_live: number of steps without an occurrence after which a key expires;
  0 for no limit.
full: for a key for which no row is free: an error, or the shared row 0.
unadmitted: for a key with fewer than min_count occurrences: zeros, or the
  shared row 0.
rank: number of this rank.
world_size: number of ranks.
first_rank: rank that owns the first buckets.
)doc");

class VocabularyOp : public OpKernel {
 public:
  explicit VocabularyOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string evict, full, unadmitted;
    int64_t min_count;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &options_.name));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("capacity", &options_.capacity));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("buckets", &options_.buckets));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("words", &words_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("min_count", &min_count));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("evict", &evict));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("steps_to_live", &options_.steps_to_live));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("full", &full));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("unadmitted", &unadmitted));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rank", &options_.rank));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("world_size", &options_.world_size));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("first_rank", &options_.first_rank));
    const int64_t buckets = options_.buckets;
    OP_REQUIRES(
        ctx,
        words_ <= 2 && options_.capacity <= kMostCapacity &&
            buckets <= options_.capacity && buckets <= kMostBuckets &&
            (buckets & (buckets - 1)) == 0 &&
            options_.rank < options_.world_size &&
            options_.first_rank < options_.world_size &&
            min_count <= std::numeric_limits<uint32_t>::max(),
        InvalidArgument(
            "Table '", options_.name,
            "': words must be 1 or 2, capacity at most ", kMostCapacity,
            ", buckets a power of two and at most capacity and ", kMostBuckets,
            ", rank and first_rank less than world_size, and min_count less "
            "than 2^32. Received: words=",
            words_, ", capacity=", options_.capacity, ", buckets=", buckets,
            ", rank=", options_.rank, ", first_rank=", options_.first_rank,
            ", world_size=", options_.world_size, ", min_count=", min_count));
    options_.min_count = min_count;
    options_.evict = evict == "lru"   ? VocabularyOptions::Evict::kLru
                     : evict == "lfu" ? VocabularyOptions::Evict::kLfu
                                      : VocabularyOptions::Evict::kNone;
    options_.full_shares = full == "shared_row";
    options_.unadmitted_shares = unadmitted == "shared_row";
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckHashKey(ctx->input(0)));
    VocabularyOptions options = options_;
    options.hash_key = HashKeyOf(ctx->input(0));
    Tensor handle(tensorflow::DT_RESOURCE, {});
    handle.scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle<Vocabulary>(
            NewVocabulary(options, words_), ctx->device()->name());
    ctx->set_output(0, handle);
  }

 private:
  VocabularyOptions options_;
  int words_ = 1;
};

REGISTER_OP("Tfdist>ExportKeys")
    .Input("vocabulary: resource")
    .Output("keys: int64")
    .Output("counts: int64")
    .Output("steps: int64")
    .Output("candidates: int64")
    .Output("candidate_counts: int64")
    .Output("candidate_steps: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Copies the keys of the buckets that this rank owns.

vocabulary: the vocabulary.
keys: [buckets, slots, words], key of row 1 + slot * B + bucket of the
  unpartitioned table, where B is the number of buckets of all ranks.
counts: [buckets, slots], number of occurrences of each key; 0 for no key.
steps: [buckets, slots], step in which each key occurred last.
candidates, candidate_counts, candidate_steps: the same for keys that are not
  admitted yet, ascending in each bucket.
)doc");

class ExportKeysOp : public OpKernel {
 public:
  explicit ExportKeysOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    RefCountPtr<Vocabulary> vocabulary;
    OP_REQUIRES_OK(ctx,
                   tensorflow::LookupResource(
                       ctx, tensorflow::HandleFromInput(ctx, 0), &vocabulary));
    KeyArrays rows, candidates;
    OP_REQUIRES_OK(ctx,
                   Allocate(ctx, 0, *vocabulary, vocabulary->slots(), &rows));
    OP_REQUIRES_OK(ctx, Allocate(ctx, 3, *vocabulary,
                                 vocabulary->candidate_slots(), &candidates));
    vocabulary->Export(rows, candidates);
  }

 private:
  static absl::Status Allocate(OpKernelContext* ctx, int first,
                               const Vocabulary& vocabulary, int64_t slots,
                               KeyArrays* arrays) {
    const auto [first_bucket, end] =
        vocabulary.OwnBuckets(vocabulary.buckets());
    const int64_t buckets = end - first_bucket;
    Tensor* outputs[3];
    TF_RETURN_IF_ERROR(AllocateOutput(
        ctx, first, {buckets, slots, vocabulary.words()}, &outputs[0]));
    for (int i = 1; i < 3; ++i) {
      TF_RETURN_IF_ERROR(
          AllocateOutput(ctx, first + i, {buckets, slots}, &outputs[i]));
    }
    for (Tensor* output : outputs) output->flat<int64_t>().setZero();
    *arrays = {static_cast<uint64_t*>(outputs[0]->data()),
               static_cast<int64_t*>(outputs[1]->data()),
               static_cast<int64_t*>(outputs[2]->data())};
    return absl::OkStatus();
  }
};

REGISTER_OP("Tfdist>ImportKeys")
    .Input("vocabulary: resource")
    .Input("buckets: int64")
    .Input("hash_key: int64")
    .Input("step: int64")
    .Input("keys: int64")
    .Input("counts: int64")
    .Input("steps: int64")
    .Input("candidates: int64")
    .Input("candidate_counts: int64")
    .Input("candidate_steps: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Replaces the keys of a vocabulary by outputs of ExportKeys.

vocabulary: the vocabulary to change.
buckets: scalar, new number of buckets of all ranks.
hash_key: [2], new key of the hash, which has assigned the keys to buckets.
step: scalar, new number of steps of the vocabulary.
keys, counts, steps: outputs of ExportKeys for the buckets that this rank owns.
  The capacity of the exported vocabulary must not be larger.
candidates, candidate_counts, candidate_steps: outputs of ExportKeys. Candidates
  that do not fit are dropped.
)doc");

class ImportKeysOp : public OpKernel {
 public:
  explicit ImportKeysOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    RefCountPtr<Vocabulary> vocabulary;
    OP_REQUIRES_OK(ctx,
                   tensorflow::LookupResource(
                       ctx, tensorflow::HandleFromInput(ctx, 0), &vocabulary));
    const int64_t buckets = ctx->input(1).scalar<int64_t>()();
    OP_REQUIRES(ctx,
                buckets >= 1 && buckets <= kMostBuckets &&
                    (buckets & (buckets - 1)) == 0 &&
                    buckets <= vocabulary->options().capacity,
                InvalidArgument(
                    "Table '", vocabulary->options().name,
                    "': the number of buckets must be a power of two, at most ",
                    kMostBuckets, " and at most the capacity of ",
                    vocabulary->options().capacity, ". Received: ", buckets,
                    ". Set at least the saved capacity in DynamicVocabulary."));
    const auto& options = vocabulary->options();
    const auto [first, end] = vocabulary->OwnBuckets(buckets);
    OP_REQUIRES_OK(ctx, CheckHashKey(ctx->input(2)));
    for (int i : {4, 7})
      OP_REQUIRES_OK(ctx, Check(ctx, i, end - first, *vocabulary));
    const HashKey hash_key = HashKeyOf(ctx->input(2));
    if (hash_key.IsZero()) {
      LOG(WARNING) << "Table '" << options.name << "': its keys were saved by "
                   << "an earlier version of tfdist_ext, which hashed without "
                   << "a secret key. Whoever chooses ids can fill one bucket "
                   << "on purpose. A new vocabulary has a secret key.";
    }
    vocabulary->Forget();
    OP_REQUIRES_OK(
        ctx,
        vocabulary->Import(buckets, hash_key, ctx->input(3).scalar<int64_t>()(),
                           Arrays(ctx, 4), ctx->input(5).dim_size(1),
                           Arrays(ctx, 7), ctx->input(8).dim_size(1)));
  }

 private:
  static absl::Status Check(OpKernelContext* ctx, int first, int64_t buckets,
                            const Vocabulary& vocabulary) {
    const Tensor& keys = ctx->input(first);
    const Tensor& counts = ctx->input(first + 1);
    const Tensor& steps = ctx->input(first + 2);
    if (counts.dims() == 2 && counts.dim_size(0) == buckets &&
        counts.shape() == steps.shape() &&
        keys.NumElements() == counts.NumElements() * vocabulary.words()) {
      return absl::OkStatus();
    }
    return InvalidArgument(
        "Table '", vocabulary.options().name, "': keys must have shape [",
        buckets, ", slots, ", vocabulary.words(), "], and counts and steps [",
        buckets, ", slots]. Received shapes: ", keys.shape().DebugString(),
        ", ", counts.shape().DebugString(), ", ", steps.shape().DebugString());
  }

  static KeyArrays Arrays(OpKernelContext* ctx, int first) {
    const auto data = [&](int i) { return ctx->input(first + i).data(); };
    return {static_cast<uint64_t*>(data(0)), static_cast<int64_t*>(data(1)),
            static_cast<int64_t*>(data(2))};
  }
};

REGISTER_OP("Tfdist>VocabularyCounts")
    .Input("vocabulary: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(9));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns counters of a vocabulary on this rank.

vocabulary: the vocabulary.
counts: [9], rows in use; candidates; keys that were admitted, evicted and
  expired since the start; steps; buckets of all ranks; two words of the hash
  key.
)doc");

class VocabularyCountsOp : public OpKernel {
 public:
  explicit VocabularyCountsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    RefCountPtr<Vocabulary> vocabulary;
    OP_REQUIRES_OK(ctx,
                   tensorflow::LookupResource(
                       ctx, tensorflow::HandleFromInput(ctx, 0), &vocabulary));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {9}, &output));
    const VocabularyCounts counts = vocabulary->Counts();
    auto values = output->vec<int64_t>();
    values(0) = counts.rows;
    values(1) = counts.candidates;
    values(2) = counts.admitted;
    values(3) = counts.evicted;
    values(4) = counts.expired;
    values(5) = counts.step;
    values(6) = vocabulary->buckets();
    const HashKey hash_key = vocabulary->hash_key();
    for (int i : {0, 1}) values(7 + i) = hash_key.words[i];
  }
};

REGISTER_OP("Tfdist>TakeResets")
    .Input("vocabulary: resource")
    .Output("rows: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns and clears the rows that lost their keys since the last call.

The slots of an optimizer still have the values of the previous keys there.

vocabulary: the vocabulary.
rows: [n], rows of all ranks in the unpartitioned table.
)doc");

class TakeResetsOp : public OpKernel {
 public:
  explicit TakeResetsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    RefCountPtr<Vocabulary> vocabulary;
    OP_REQUIRES_OK(ctx,
                   tensorflow::LookupResource(
                       ctx, tensorflow::HandleFromInput(ctx, 0), &vocabulary));
    const std::vector<int32_t> rows = vocabulary->TakeResets();
    Tensor* output = nullptr;
    const int64_t count = rows.size();
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {count}, &output));
    std::copy(rows.begin(), rows.end(), output->vec<int64_t>().data());
  }
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>Vocabulary").Device(tensorflow::DEVICE_CPU), VocabularyOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>ExportKeys").Device(tensorflow::DEVICE_CPU), ExportKeysOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>ImportKeys").Device(tensorflow::DEVICE_CPU), ImportKeysOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>VocabularyCounts").Device(tensorflow::DEVICE_CPU),
    VocabularyCountsOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>TakeResets").Device(tensorflow::DEVICE_CPU), TakeResetsOp);

}  // namespace
}  // namespace tfdist
