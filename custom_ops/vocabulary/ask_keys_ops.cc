// SPDX-License-Identifier: Apache-2.0
#include <variant>
#include <vector>

#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/embedding/header_bytes.h"
#include "custom_ops/vocabulary/key_lists.h"
#include "custom_ops/vocabulary/key_messages.h"
#include "custom_ops/vocabulary/unique_keys.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

constexpr int64_t kNanosecondsPerKey = 20;

REGISTER_OP("Tfdist>AskKeys")
    .Input("vocabularies: T * resource")
    .Input("keys: L * int64")
    .Output("payload: uint8")
    .Output("splits: int64")
    .Output("positions: int32")
    .Output("asked: int64")
    .Attr("T: int >= 1")
    .Attr("L: int >= 1")
    .Attr("list_vocabularies: list(int)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 3; ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      c->set_output(3, c->Matrix(InferenceContext::kUnknownDim,
                                 InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Asks the ranks that own keys for their rows.

keys: L lists of keys, [n_i] or [n_i, 2] of fingerprints.
payload: messages for AnswerKeys, in order of the ranks they go to.
splits: [ranks], bytes for every rank.
positions: [sum of n_i], where every key of the lists is among the unique ones
  of its vocabulary.
asked: [T, ranks], unique keys of every vocabulary that go to every rank.
list_vocabularies: of every list, ascending; none without a list.
)doc");

class AskKeysOp : public OpKernel {
 public:
  explicit AskKeysOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, lists_.ReadAttributes(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    Vocabularies vocabularies;
    OP_REQUIRES_OK(ctx, vocabularies.Read(ctx));
    std::vector<std::vector<KeyList>> lists;
    int64_t count = 0;
    OP_REQUIRES_OK(ctx, lists_.Read(ctx, vocabularies, &lists, &count));
    Tensor* positions = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 2, {count}, &positions));
    const int64_t tables = vocabularies.size();
    const int64_t ranks = vocabularies.world_size();
    Tensor* asked = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 3, {tables, ranks}, &asked));
    auto asked_of = asked->matrix<int64_t>();
    std::vector<int64_t> firsts;
    for (int64_t t = 0, first = 0; t < tables; ++t) {
      firsts.push_back(first);
      for (const KeyList& list : lists[t]) first += list.size;
    }
    const auto each_table = [&](const auto& work) {
      auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
      ParallelUnits(pool, tables, kNanosecondsPerKey * (count / tables + 1),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t t = begin; t < end; ++t) work(t);
                    });
    };
    tensorflow::mutex_lock lock(mutex_);
    unique_.resize(tables);
    // Bytes by table and rank.
    std::vector<std::vector<int64_t>> bytes(tables,
                                            std::vector<int64_t>(ranks));
    each_table([&](int64_t t) {
      if (vocabularies[t].words() == 1) {
        if (unique_[t].index() != 1) unique_[t].emplace<1>();
      } else if (unique_[t].index() != 2) {
        unique_[t].emplace<2>();
      }
      Visit(&unique_[t], [&](auto* keys) {
        keys->Find(lists[t], vocabularies[t],
                   positions->vec<int32_t>().data() + firsts[t]);
        for (int64_t rank = 0; rank < ranks; ++rank) {
          asked_of(t, rank) = keys->SizeFor(rank);
          bytes[t][rank] = keys->BytesFor(rank);
        }
      });
    });
    Tensor* splits = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {ranks}, &splits));
    int64_t size = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t before = size;
      for (const auto& each : bytes) size += each[rank];
      splits->vec<int64_t>()(rank) = size - before;
    }
    Tensor* payload = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {size}, &payload));
    std::vector<std::vector<uint8_t*>> outputs(tables,
                                               std::vector<uint8_t*>(ranks));
    auto* out = static_cast<uint8_t*>(payload->data());
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (int64_t t = 0; t < tables; ++t) {
        outputs[t][rank] = out;
        out += bytes[t][rank];
      }
    }
    each_table([&](int64_t t) {
      Visit(&unique_[t], [&](auto* keys) { keys->Write(outputs[t]); });
    });
  }

 private:
  using Unique = std::variant<std::monostate, UniqueKeys<1>, UniqueKeys<2>>;

  template <typename Visitor>
  static void Visit(Unique* unique, const Visitor& visit) {
    if (auto* keys = std::get_if<1>(unique)) visit(keys);
    if (auto* keys = std::get_if<2>(unique)) visit(keys);
  }

  KeyLists lists_;
  tensorflow::mutex mutex_;
  std::vector<Unique> unique_ TF_GUARDED_BY(mutex_);
};

REGISTER_OP("Tfdist>AnswerKeys")
    .Input("vocabularies: T * resource")
    .Input("payload: uint8")
    .Input("splits: int64")
    .Output("answers: uint8")
    .Output("answer_splits: int64")
    .Attr("T: int >= 1")
    .Attr("learn: bool")
    .Attr("advance: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 2; ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Answers what AskKeys of all ranks asked this one.

An error, a vocabulary that is full for example, goes to all ranks: ReadRows
raises it.

payload: the messages, in order of the ranks they came from.
splits: [ranks], bytes from every rank.
answers: messages for ReadRows, in order of the ranks they go to.
answer_splits: [ranks], bytes for every rank.
learn: whether keys are counted, and admitted.
advance: whether a step begins, for which others' keys may be evicted.
)doc");

class AnswerKeysOp : public OpKernel {
 public:
  explicit AnswerKeysOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("learn", &learn_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("advance", &advance_));
  }

  void Compute(OpKernelContext* ctx) override {
    Vocabularies vocabularies;
    OP_REQUIRES_OK(ctx, vocabularies.Read(ctx));
    std::vector<Question> questions;
    OP_REQUIRES_OK(ctx, Read(ctx, vocabularies, &questions));
    const int64_t tables = vocabularies.size();
    std::vector<std::vector<int32_t>> resets(tables);
    std::vector<absl::Status> statuses(tables);
    int64_t keys = 0;
    for (const Question& question : questions) keys += question.rows.size();
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    ParallelUnits(pool, tables, kNanosecondsPerKey * (keys / tables + 1),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t t = begin; t < end; ++t) {
                      statuses[t] =
                          Answer(&vocabularies[t], t, &questions, &resets[t]);
                    }
                  });
    absl::Status status;
    for (const absl::Status& each : statuses) status.Update(each);
    const int64_t ranks = vocabularies.world_size();
    std::vector<KeyMessage> answers(ranks);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      answers[rank].Varint(!status.ok());
      if (!status.ok()) {
        const std::string text(status.message());
        answers[rank].Varint(static_cast<uint64_t>(status.code()));
        answers[rank].Bytes(text.data(), text.size());
        continue;
      }
      for (int64_t t = 0; t < tables; ++t) {
        const auto& rows = questions[rank * tables + t].rows;
        answers[rank].Bytes(rows.data(), rows.size() * sizeof(int32_t));
        answers[rank].Varint(resets[t].size());
        answers[rank].Bytes(resets[t].data(),
                            resets[t].size() * sizeof(int32_t));
      }
    }
    OP_REQUIRES_OK(ctx, WriteMessages(ctx, answers));
  }

 private:
  // Of one rank, about one table.
  struct Question {
    const void* keys = nullptr;
    std::vector<uint32_t> counts;
    std::vector<int32_t> rows;
  };

  absl::Status Read(OpKernelContext* ctx, const Vocabularies& vocabularies,
                    std::vector<Question>* questions) const {
    const Tensor& payload = ctx->input(vocabularies.size());
    const Tensor& splits = ctx->input(vocabularies.size() + 1);
    const int64_t ranks = vocabularies.world_size();
    TF_RETURN_IF_ERROR(CheckMessages(payload, splits, ranks));
    const auto* data = static_cast<const uint8_t*>(payload.data());
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t size = splits.vec<int64_t>()(rank);
      HeaderReader message(data, size);
      data += size;
      for (int64_t t = 0; t < vocabularies.size(); ++t) {
        questions->emplace_back();
        if (!ReadOne(&message, vocabularies[t].words(), &questions->back())) {
          return MalformedKeys(rank);
        }
      }
      if (message.left() != 0) return MalformedKeys(rank);
    }
    return absl::OkStatus();
  }

  static bool ReadOne(HeaderReader* message, int words, Question* question) {
    const uint64_t size = message->Varint();
    const bool once = message->Varint() == 1;
    if (!message->ok() || size > message->left() / (8 * words)) return false;
    question->keys = message->next();
    message->Skip(size * 8 * words);
    if (!once) {
      if (size > message->left()) return false;
      question->counts.reserve(size);
      for (uint64_t i = 0; i < size; ++i) {
        question->counts.push_back(message->Varint());
      }
    }
    question->rows.resize(size);
    return message->ok();
  }

  absl::Status Answer(Vocabulary* vocabulary, int64_t table,
                      std::vector<Question>* questions,
                      std::vector<int32_t>* resets) const {
    const int64_t ranks = vocabulary->options().world_size;
    const int64_t tables = questions->size() / ranks;
    std::vector<KeyRequest> requests;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Question& question = (*questions)[rank * tables + table];
      requests.push_back(
          {question.keys,
           question.counts.empty() ? nullptr : question.counts.data(),
           static_cast<int64_t>(question.rows.size()), question.rows.data()});
    }
    if (learn_) return vocabulary->LearnStep(requests, advance_, resets);
    return vocabulary->Find(requests);
  }

  bool learn_ = false;
  bool advance_ = false;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>AskKeys").Device(tensorflow::DEVICE_CPU),
                        AskKeysOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>AnswerKeys").Device(tensorflow::DEVICE_CPU), AnswerKeysOp);

}  // namespace
}  // namespace tfdist
