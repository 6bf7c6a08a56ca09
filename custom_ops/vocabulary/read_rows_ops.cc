// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "custom_ops/codec/header_bytes.h"
#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/vocabulary/key_lists.h"
#include "custom_ops/vocabulary/key_messages.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

constexpr int64_t kNanosecondsPerRow = 15;

absl::Status VectorsShape(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) {
    c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
  }
  return absl::OkStatus();
}

// Allocates an output for the rows of each list.
absl::Status AllocateRows(OpKernelContext* ctx,
                          const std::vector<std::vector<KeyList>>& lists,
                          std::vector<int32_t*>* rows) {
  for (const auto& of_table : lists) {
    for (const KeyList& list : of_table) {
      Tensor* output = nullptr;
      const int index = rows->size();
      TF_RETURN_IF_ERROR(AllocateOutput(ctx, index, {list.size}, &output));
      rows->push_back(output->vec<int32_t>().data());
    }
  }
  return absl::OkStatus();
}

// Writes the rows that have lost their keys to an output, and stores them for
// the optimizer. If the step has failed before this, the next step returns
// these rows again.
absl::Status WriteResets(OpKernelContext* ctx, int index,
                         const std::vector<int32_t>& resets,
                         Vocabulary* vocabulary) {
  Tensor* output = nullptr;
  const int64_t count = resets.size();
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, index, {count}, &output));
  std::copy(resets.begin(), resets.end(), output->vec<int64_t>().data());
  vocabulary->StoreResets(resets);
  return absl::OkStatus();
}

REGISTER_OP("Tfdist>ReadRows")
    .Input("vocabularies: T * resource")
    .Input("keys: L * int64")
    .Input("answers: uint8")
    .Input("splits: int64")
    .Input("positions: int32")
    .Input("places: int32")
    .Input("asked: int64")
    .Output("rows: L * int32")
    .Output("resets: T * int64")
    .Attr("T: int >= 1")
    .Attr("L: int >= 1")
    .Attr("list_vocabularies: list(int)")
    .SetIsStateful()
    .SetShapeFn(VectorsShape)
    .Doc(R"doc(
Decodes the answers of AnswerKeys that this rank has received.

vocabularies: T vocabularies.
keys: the lists that were passed to AskKeys.
answers: answers from all ranks, ordered by sender.
splits: [ranks], bytes of the answer from each rank.
positions, places, asked: outputs of AskKeys.
rows: for each list, the rows of its keys in the unpartitioned table [n_i]. -1
  for a key without a row.
resets: for each vocabulary, the rows of the unpartitioned table that lost their
  keys in this step.
list_vocabularies: as for AskKeys.
)doc");

class ReadRowsOp : public OpKernel {
 public:
  explicit ReadRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, lists_.ReadAttributes(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    Vocabularies vocabularies;
    OP_REQUIRES_OK(ctx, vocabularies.Read(ctx));
    std::vector<std::vector<KeyList>> lists;
    int64_t count = 0;
    OP_REQUIRES_OK(ctx, lists_.Read(ctx, vocabularies, &lists, &count));
    const int64_t tables = vocabularies.size();
    std::vector<std::vector<int32_t>> unique(tables), resets(tables);
    OP_REQUIRES_OK(ctx, ReadAnswers(ctx, vocabularies, &unique, &resets));
    const Tensor* positions = nullptr;
    OP_REQUIRES_OK(ctx, ctx->input("positions", &positions));
    OP_REQUIRES(
        ctx, positions->NumElements() == count,
        InvalidArgument("positions must have one element per key, ", count,
                        ". Received: ", positions->NumElements()));
    std::vector<int32_t*> rows;
    OP_REQUIRES_OK(ctx, AllocateRows(ctx, lists, &rows));
    const int32_t* position = positions->flat<int32_t>().data();
    auto row = rows.begin();
    for (int64_t t = 0; t < tables; ++t) {
      for (const KeyList& list : lists[t]) {
        OP_REQUIRES(ctx, Take(unique[t], position, list.size, *row++),
                    InvalidArgument("positions must be less than the number of "
                                    "unique keys, ",
                                    unique[t].size(),
                                    ". Pass positions, places and asked of "
                                    "one call of AskKeys"));
        position += list.size;
      }
      OP_REQUIRES_OK(
          ctx, WriteResets(ctx, rows.size() + t, resets[t], &vocabularies[t]));
    }
  }

 private:
  // Returns false if a position does not refer to a unique key.
  static bool Take(const std::vector<int32_t>& unique, const int32_t* positions,
                   int64_t size, int32_t* rows) {
    const uint32_t known = unique.size();
    bool good = true;
    for (int64_t i = 0; i < size; ++i) {
      const uint32_t position = positions[i];
      good &= position < known;
      rows[i] = position < known ? unique[position] : -1;
    }
    return good;
  }

  static absl::Status ReadAnswers(OpKernelContext* ctx,
                                  const Vocabularies& vocabularies,
                                  std::vector<std::vector<int32_t>>* unique,
                                  std::vector<std::vector<int32_t>>* resets) {
    const int64_t tables = vocabularies.size();
    const int64_t ranks = vocabularies.world_size();
    const Tensor *found, *lengths, *order, *counts;
    TF_RETURN_IF_ERROR(ctx->input("answers", &found));
    TF_RETURN_IF_ERROR(ctx->input("splits", &lengths));
    TF_RETURN_IF_ERROR(ctx->input("places", &order));
    TF_RETURN_IF_ERROR(ctx->input("asked", &counts));
    const Tensor &answers = *found, &splits = *lengths, &asked = *counts;
    TF_RETURN_IF_ERROR(CheckMessages(answers, splits, ranks));
    if (asked.dims() != 2 || asked.dim_size(0) != tables ||
        asked.dim_size(1) != ranks) {
      return InvalidArgument(
          "asked must be [", tables, ", ", ranks,
          "]. Received shape: ", asked.shape().DebugString());
    }
    // In the order of the ranks.
    std::vector<std::vector<int32_t>> rows(tables);
    const auto* data = static_cast<const uint8_t*>(answers.data());
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t size = splits.vec<int64_t>()(rank);
      HeaderReader message(data, size);
      data += size;
      if (message.Varint() != 0) {
        const auto code = static_cast<absl::StatusCode>(message.Varint());
        return absl::Status(
            code, std::string(reinterpret_cast<const char*>(message.next()),
                              message.left()));
      }
      for (int64_t t = 0; t < tables; ++t) {
        const int64_t count = asked.matrix<int64_t>()(t, rank);
        if (!Take(count, &message, &rows[t]) ||
            !Take(message.Varint(), &message, &(*resets)[t])) {
          return MalformedKeys(rank);
        }
      }
      if (!message.ok() || message.left() != 0) return MalformedKeys(rank);
    }
    const int32_t* place = order->flat<int32_t>().data();
    int64_t left = order->NumElements();
    for (int64_t t = 0; t < tables; ++t) {
      const int64_t size = rows[t].size();
      (*unique)[t].resize(size);
      if (size > left || !Take(rows[t], place, size, (*unique)[t].data())) {
        return BadPlaces();
      }
      place += size;
      left -= size;
    }
    if (left == 0) return absl::OkStatus();
    return BadPlaces();
  }

  static absl::Status BadPlaces() {
    return InvalidArgument(
        "places must have one element per unique key, which asked counts, and "
        "each must be the index of such a key. Pass positions, places and "
        "asked of one call of AskKeys");
  }

  // Reads rows from a message and appends them to `rows`.
  static bool Take(uint64_t count, HeaderReader* message,
                   std::vector<int32_t>* rows) {
    if (!message->ok() || count > message->left() / sizeof(int32_t)) {
      return false;
    }
    if (count == 0) return true;
    const size_t first = rows->size();
    rows->resize(first + count);
    std::memcpy(rows->data() + first, message->next(), count * sizeof(int32_t));
    message->Skip(count * sizeof(int32_t));
    return true;
  }

  KeyLists lists_;
};

REGISTER_OP("Tfdist>LocalRows")
    .Input("vocabularies: T * resource")
    .Input("keys: L * int64")
    .Output("rows: L * int32")
    .Output("resets: T * int64")
    .Attr("T: int >= 1")
    .Attr("L: int >= 1")
    .Attr("list_vocabularies: list(int)")
    .Attr("learn: bool")
    .Attr("advance: bool")
    .SetIsStateful()
    .SetShapeFn(VectorsShape)
    .Doc(R"doc(
Looks up the rows of keys on one rank, without messages.

The results are those of AskKeys, AnswerKeys and ReadRows.

vocabularies, keys, list_vocabularies: as for AskKeys.
learn, advance: as for AnswerKeys.
rows, resets: as for ReadRows.
)doc");

class LocalRowsOp : public OpKernel {
 public:
  explicit LocalRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, lists_.ReadAttributes(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("learn", &learn_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("advance", &advance_));
  }

  void Compute(OpKernelContext* ctx) override {
    Vocabularies vocabularies;
    OP_REQUIRES_OK(ctx, vocabularies.Read(ctx));
    std::vector<std::vector<KeyList>> lists;
    int64_t count = 0;
    OP_REQUIRES_OK(ctx, lists_.Read(ctx, vocabularies, &lists, &count));
    const int64_t tables = vocabularies.size();
    std::vector<int32_t*> rows;
    OP_REQUIRES_OK(ctx, AllocateRows(ctx, lists, &rows));
    std::vector<std::vector<KeyRequest>> requests(tables);
    auto row = rows.begin();
    for (int64_t t = 0; t < tables; ++t) {
      for (const KeyList& list : lists[t]) {
        requests[t].push_back({list.keys, nullptr, list.size, *row++});
      }
    }
    std::vector<std::vector<int32_t>> resets(tables);
    std::vector<absl::Status> statuses(tables);
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    ParallelUnits(pool, tables, kNanosecondsPerRow * (count / tables + 1),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t t = begin; t < end; ++t) {
                      statuses[t] = learn_
                                        ? vocabularies[t].LearnStep(
                                              requests[t], advance_, &resets[t])
                                        : vocabularies[t].Find(requests[t]);
                    }
                  });
    for (const absl::Status& status : statuses) OP_REQUIRES_OK(ctx, status);
    for (int64_t t = 0; t < tables; ++t) {
      OP_REQUIRES_OK(
          ctx, WriteResets(ctx, rows.size() + t, resets[t], &vocabularies[t]));
    }
  }

 private:
  KeyLists lists_;
  bool learn_ = false;
  bool advance_ = false;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>ReadRows").Device(tensorflow::DEVICE_CPU),
                        ReadRowsOp);
REGISTER_KERNEL_BUILDER(Name("Tfdist>LocalRows").Device(tensorflow::DEVICE_CPU),
                        LocalRowsOp);

}  // namespace
}  // namespace tfdist
