// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "custom_ops/codec/header_bytes.h"
#include "custom_ops/common/parallel_tasks.h"
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
constexpr int64_t kNanosecondsPerUniqueKey = 2;

REGISTER_OP("Tfdist>AskKeys")
    .Input("vocabularies: T * resource")
    .Input("keys: L * int64")
    .Output("payload: uint8")
    .Output("splits: int64")
    .Output("positions: int32")
    .Output("places: int32")
    .Output("asked: int64")
    .Attr("T: int >= 1")
    .Attr("L: int >= 1")
    .Attr("list_vocabularies: list(int)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 4; ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      c->set_output(4, c->Matrix(InferenceContext::kUnknownDim,
                                 InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Encodes requests for the rows of keys, to the ranks that own the keys.

Each rank passes the messages that it receives to AnswerKeys.

vocabularies: T vocabularies.
keys: L lists of keys: ids [n_i], or fingerprints [n_i, 2].
payload: messages to all ranks, ordered by receiver.
splits: [ranks], bytes of the message to each rank.
positions: [sum of n_i], index of each key in the unique keys of its vocabulary.
places: [sum of unique keys], for each unique key of each vocabulary, its index
  in the order in which the messages contain the keys of this vocabulary.
asked: [T, ranks], number of unique keys of each vocabulary in the message to
  each rank.
list_vocabularies: index of the vocabulary of each list, ascending. Each
  vocabulary has at least one list.
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
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 4, {tables, ranks}, &asked));
    auto asked_of = asked->matrix<int64_t>();
    std::vector<int64_t> firsts;
    for (int64_t t = 0, first = 0; t < tables; ++t) {
      firsts.push_back(first);
      for (const KeyList& list : lists[t]) first += list.size;
    }
    const auto each_table = [&](int64_t nanoseconds, const auto& work) {
      auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
      ParallelUnits(pool, tables, nanoseconds / tables + 1,
                    [&](int64_t begin, int64_t end) {
                      for (int64_t t = begin; t < end; ++t) work(t);
                    });
    };
    tensorflow::mutex_lock lock(mutex_);
    unique_.resize(tables);
    // Bytes by table and rank.
    std::vector<std::vector<int64_t>> bytes(tables,
                                            std::vector<int64_t>(ranks));
    each_table(kNanosecondsPerKey * count, [&](int64_t t) {
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
    firsts = {0};
    for (int64_t t = 0; t < tables; ++t) {
      int64_t unique = 0;
      Visit(&unique_[t], [&](auto* keys) { unique = keys->size(); });
      firsts.push_back(firsts.back() + unique);
    }
    Tensor* places = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 3, {firsts.back()}, &places));
    each_table(kNanosecondsPerUniqueKey * firsts.back(), [&](int64_t t) {
      Visit(&unique_[t], [&](auto* keys) {
        keys->Write(outputs[t], places->vec<int32_t>().data() + firsts[t]);
      });
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
Answers the requests of AskKeys that this rank has received.

Each rank passes the answers that it receives to ReadRows. An error, such as a
full vocabulary, is sent to all ranks, and ReadRows raises it.

vocabularies: T vocabularies.
payload: messages from all ranks, ordered by sender.
splits: [ranks], bytes of the message from each rank.
answers: answers to all ranks, ordered by receiver.
answer_splits: [ranks], bytes of the answer to each rank.
learn: whether to count the keys and to assign rows to new keys.
advance: whether a new step begins. Keys that occurred in the current step are
  not evicted.
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
    for (const Question& question : questions) keys += question.size();
    const std::unique_ptr<int32_t[]> rows(new int32_t[keys]);
    int32_t* next_rows = rows.get();
    for (Question& question : questions) {
      question.rows = next_rows;
      next_rows += question.size();
    }
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    ParallelUnits(pool, tables, kNanosecondsPerKey * (keys / tables + 1),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t t = begin; t < end; ++t) {
                      statuses[t] =
                          Answer(&vocabularies[t], t, questions, &resets[t]);
                    }
                  });
    absl::Status status;
    for (const absl::Status& each : statuses) status.Update(each);
    OP_REQUIRES_OK(ctx, status.ok() ? WriteRows(ctx, questions, resets)
                                    : WriteError(ctx, vocabularies, status));
  }

 private:
  // The question of one rank about one table.
  struct Question {
    const uint8_t* keys = nullptr;
    int64_t once = 0;              // number of keys that occurred once
    std::vector<uint32_t> counts;  // counts of the other keys
    int32_t* rows = nullptr;

    int64_t size() const { return once + counts.size(); }
  };

  // Allocates the outputs for answers of `bytes` bytes per rank. Sets `answers`
  // to their start.
  static absl::Status Allocate(OpKernelContext* ctx,
                               const std::vector<int64_t>& bytes,
                               uint8_t** answers) {
    int64_t size = 0;
    for (const int64_t each : bytes) size += each;
    Tensor* payload = nullptr;
    Tensor* splits = nullptr;
    const int64_t ranks = bytes.size();
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {size}, &payload));
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 1, {ranks}, &splits));
    std::copy(bytes.begin(), bytes.end(), splits->vec<int64_t>().data());
    *answers = static_cast<uint8_t*>(payload->data());
    return absl::OkStatus();
  }

  static absl::Status WriteRows(
      OpKernelContext* ctx, const std::vector<Question>& questions,
      const std::vector<std::vector<int32_t>>& resets) {
    const int64_t tables = resets.size();
    std::vector<int64_t> bytes;
    for (size_t i = 0; i < questions.size(); ++i) {
      const int64_t lost = resets[i % tables].size();
      if (i % tables == 0) bytes.push_back(1);
      bytes.back() +=
          VarintSize(lost) + (questions[i].size() + lost) * sizeof(int32_t);
    }
    uint8_t* out = nullptr;
    TF_RETURN_IF_ERROR(Allocate(ctx, bytes, &out));
    for (size_t i = 0; i < questions.size(); ++i) {
      const std::vector<int32_t>& lost = resets[i % tables];
      if (i % tables == 0) out = PutVarint(0, out);
      out = Put(questions[i].rows, questions[i].size(), out);
      out = Put(lost.data(), lost.size(), PutVarint(lost.size(), out));
    }
    return absl::OkStatus();
  }

  static uint8_t* Put(const int32_t* rows, size_t size, uint8_t* out) {
    if (size > 0) std::memcpy(out, rows, size * sizeof(int32_t));
    return out + size * sizeof(int32_t);
  }

  static absl::Status WriteError(OpKernelContext* ctx,
                                 const Vocabularies& vocabularies,
                                 const absl::Status& error) {
    const int64_t ranks = vocabularies.world_size();
    const std::string text(error.message());
    const auto code = static_cast<uint64_t>(error.code());
    const int64_t size = 1 + VarintSize(code) + text.size();
    uint8_t* out = nullptr;
    TF_RETURN_IF_ERROR(Allocate(ctx, std::vector<int64_t>(ranks, size), &out));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      out = PutVarint(code, PutVarint(1, out));
      out = std::copy(text.begin(), text.end(), out);
    }
    return absl::OkStatus();
  }

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
    const uint64_t once = message->Varint();
    const uint64_t others = message->Varint();
    const uint64_t most = message->left() / (8 * words);
    if (!message->ok() || once > most || others > most - once) return false;
    question->keys = message->next();
    question->once = once;
    message->Skip((once + others) * 8 * words);
    if (others > message->left()) return false;
    question->counts.resize(others);
    bool good = true;
    for (uint32_t& count : question->counts) {
      count = static_cast<uint32_t>(message->Varint());
      good &= count > 0;
    }
    return good && message->ok();
  }

  absl::Status Answer(Vocabulary* vocabulary, int64_t table,
                      const std::vector<Question>& questions,
                      std::vector<int32_t>* resets) const {
    const int64_t ranks = vocabulary->options().world_size;
    const int64_t tables = questions.size() / ranks;
    std::vector<KeyRequest> requests;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const Question& asked = questions[rank * tables + table];
      const int64_t others = asked.counts.size();
      requests.push_back({asked.keys, nullptr, asked.once, asked.rows});
      requests.push_back({asked.keys + asked.once * 8 * vocabulary->words(),
                          asked.counts.data(), others,
                          asked.rows + asked.once});
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
