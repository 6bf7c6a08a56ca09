// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/embedding/header_bytes.h"
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

constexpr int64_t kNanosecondsPerKey = 15;

absl::Status VectorsShape(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) {
    c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
  }
  return absl::OkStatus();
}

// Writes the rows that have lost their keys as an output, and leaves them to
// the optimizer.
absl::Status WriteResets(OpKernelContext* ctx, int index,
                         const std::vector<int32_t>& resets,
                         Vocabulary* vocabulary) {
  Tensor* output = nullptr;
  const int64_t count = resets.size();
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, index, {count}, &output));
  std::copy(resets.begin(), resets.end(), output->vec<int64_t>().data());
  vocabulary->LeaveResets(resets);
  return absl::OkStatus();
}

REGISTER_OP("Tfdist>ReadRows")
    .Input("vocabularies: T * resource")
    .Input("answers: uint8")
    .Input("splits: int64")
    .Input("positions: int32")
    .Input("asked: int64")
    .Input("sizes: int64")
    .Output("rows: int64")
    .Output("resets: T * int64")
    .Attr("T: int >= 1")
    .SetIsStateful()
    .SetShapeFn(VectorsShape)
    .Doc(R"doc(
Reads what AnswerKeys of all ranks answered to this one.

answers: the messages, in order of the ranks they came from.
splits: [ranks], bytes from every rank.
positions, asked: of AskKeys.
sizes: [T], keys of the lists of every vocabulary.
rows: of every key of the lists, of the whole table; -1 for none.
resets: for every vocabulary the rows, of the whole table, that have lost their
  keys in this step.
)doc");

class ReadRowsOp : public OpKernel {
 public:
  explicit ReadRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    Vocabularies vocabularies;
    OP_REQUIRES_OK(ctx, vocabularies.Read(ctx));
    const int64_t tables = vocabularies.size();
    std::vector<std::vector<int32_t>> unique(tables), resets(tables);
    OP_REQUIRES_OK(ctx, ReadAnswers(ctx, vocabularies, &unique, &resets));
    const Tensor& positions = ctx->input(tables + 2);
    const Tensor& sizes = ctx->input(tables + 4);
    OP_REQUIRES(ctx, sizes.NumElements() == tables,
                InvalidArgument("sizes must have an element for each of ",
                                tables, " vocabularies"));
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx,
                   AllocateOutput(ctx, 0, {positions.NumElements()}, &rows));
    const int32_t* position = positions.flat<int32_t>().data();
    int64_t* row = rows->vec<int64_t>().data();
    int64_t left = positions.NumElements();
    for (int64_t t = 0; t < tables; ++t) {
      const int64_t size = sizes.flat<int64_t>()(t);
      OP_REQUIRES(ctx, size >= 0 && size <= left,
                  InvalidArgument("sizes do not fit positions"));
      left -= size;
      const uint32_t known = unique[t].size();
      bool fits = true;
      for (int64_t i = 0; i < size; ++i) {
        const uint32_t place = *position++;
        fits &= place < known;
        *row++ = place < known ? unique[t][place] : -1;
      }
      OP_REQUIRES(ctx, fits, InvalidArgument("positions do not fit asked"));
      OP_REQUIRES_OK(ctx, WriteResets(ctx, 1 + t, resets[t], &vocabularies[t]));
    }
  }

 private:
  static absl::Status ReadAnswers(OpKernelContext* ctx,
                                  const Vocabularies& vocabularies,
                                  std::vector<std::vector<int32_t>>* unique,
                                  std::vector<std::vector<int32_t>>* resets) {
    const int64_t tables = vocabularies.size();
    const int64_t ranks = vocabularies.world_size();
    const Tensor& answers = ctx->input(tables);
    const Tensor& splits = ctx->input(tables + 1);
    const Tensor& asked = ctx->input(tables + 3);
    TF_RETURN_IF_ERROR(CheckMessages(answers, splits, ranks));
    if (asked.dims() != 2 || asked.dim_size(0) != tables ||
        asked.dim_size(1) != ranks) {
      return InvalidArgument(
          "asked must be [", tables, ", ", ranks,
          "]. Received shape: ", asked.shape().DebugString());
    }
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
        if (!Take(count, &message, &(*unique)[t]) ||
            !Take(message.Varint(), &message, &(*resets)[t])) {
          return MalformedKeys(rank);
        }
      }
      if (!message.ok() || message.left() != 0) return MalformedKeys(rank);
    }
    return absl::OkStatus();
  }

  // Takes rows off a message and puts them behind others.
  static bool Take(uint64_t count, HeaderReader* message,
                   std::vector<int32_t>* rows) {
    if (!message->ok() || count > message->left() / sizeof(int32_t)) {
      return false;
    }
    const size_t first = rows->size();
    rows->resize(first + count);
    std::memcpy(rows->data() + first, message->next(), count * sizeof(int32_t));
    message->Skip(count * sizeof(int32_t));
    return true;
  }
};

REGISTER_OP("Tfdist>LocalRows")
    .Input("vocabularies: T * resource")
    .Input("keys: L * int64")
    .Output("rows: int64")
    .Output("resets: T * int64")
    .Attr("T: int >= 1")
    .Attr("L: int >= 1")
    .Attr("list_vocabularies: list(int)")
    .Attr("learn: bool")
    .Attr("advance: bool")
    .SetIsStateful()
    .SetShapeFn(VectorsShape)
    .Doc(R"doc(
What AskKeys, AnswerKeys and ReadRows do, where there is one rank.
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
    std::vector<int32_t> found(count);
    const int64_t tables = vocabularies.size();
    std::vector<std::vector<KeyRequest>> requests(tables);
    int64_t at = 0;
    for (int64_t t = 0; t < tables; ++t) {
      for (const KeyList& list : lists[t]) {
        requests[t].push_back(
            {list.keys, nullptr, list.size, found.data() + at});
        at += list.size;
      }
    }
    std::vector<std::vector<int32_t>> resets(tables);
    std::vector<absl::Status> statuses(tables);
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    ParallelUnits(pool, tables, kNanosecondsPerKey * (count / tables + 1),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t t = begin; t < end; ++t) {
                      statuses[t] = learn_
                                        ? vocabularies[t].Learn(
                                              requests[t], advance_, &resets[t])
                                        : vocabularies[t].Find(requests[t]);
                    }
                  });
    for (const absl::Status& status : statuses) OP_REQUIRES_OK(ctx, status);
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {count}, &rows));
    std::copy(found.begin(), found.end(), rows->vec<int64_t>().data());
    for (int64_t t = 0; t < tables; ++t) {
      OP_REQUIRES_OK(ctx, WriteResets(ctx, 1 + t, resets[t], &vocabularies[t]));
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
