// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "entry_builder.h"
#include "id_codec.h"
#include "id_lists.h"
#include "table_attrs.h"
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
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>EncodeIds")
    .Input("ids: N * Tids")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Input("samples: float")
    .Output("payload: uint8")
    .Output("send_splits: int64")
    .Output("sample_ids: int32")
    .Output("sample_splits: int64")
    .Attr("N: int >= 1")
    .Attr("Tids: {int32, int64}")
    .Attr("rank: int >= 0")
    .Attr("world_size: int >= 1")
    .Attr("vocabulary_size: int >= 1")
    .Attr("placement: {'row', 'column'}")
    .Attr("out_of_range: {'error', 'ignore'} = 'error'")
    .Attr("layer: string = ''")
    .SetShapeFn([](InferenceContext* c) {
      int64_t world_size;
      TF_RETURN_IF_ERROR(c->GetAttr("world_size", &world_size));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(world_size));
      c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(3, c->Vector(world_size));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Codes the ids of this rank's samples for the ranks that own their rows.

The lists are merged per sample, duplicates combined (their weights summed) and
the result compressed, one message per owner; with placement "column" every rank
owns columns of every row, and one message goes to all. A bad id under
out_of_range="error" becomes an error record that DecodeIds raises on all ranks.

ids: N lists of ids, each [n_i].
row_splits: N offset vectors, each [b + 1]; list i's ids of sample s are
  ids[i][row_splits[i][s] : row_splits[i][s + 1]].
weights: N vectors, each [n_i], or [0] when all weights are 1.
samples: scalar, this rank's weight in the batch mean; travels along.
payload: the messages, in order of the owners.
send_splits: [world_size], bytes for every owner.
sample_ids: for every owner, in order, the samples it gets ids of.
sample_splits: [world_size], how many those are.
)doc");

// Fewer ids than this are not worth a second thread.
constexpr int64_t kIdsPerTask = 16384;
constexpr int64_t kNanosecondsPerId = 20;

template <typename Tids>
class EncodeIdsOp : public OpKernel {
 public:
  explicit EncodeIdsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadTableAttrs(ctx, &attrs_));
    std::string out_of_range;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("out_of_range", &out_of_range));
    ignore_bad_ids_ = out_of_range == "ignore";
  }

  void Compute(OpKernelContext* ctx) override {
    IdLists<Tids> lists;
    OP_REQUIRES_OK(ctx, ReadIdLists(ctx, &lists));
    const Tensor* samples;
    OP_REQUIRES_OK(ctx, ctx->input("samples", &samples));
    OP_REQUIRES(ctx, samples->NumElements() == 1,
                InvalidArgument("samples must be a scalar. Received shape: ",
                                samples->shape().DebugString()));
    Batch batch;
    BuildEntries(ctx, lists, &batch);
    WriteMessages(ctx, *static_cast<const float*>(samples->data()), &batch);
  }

 private:
  // The entries of consecutive ranges of samples.
  struct Batch {
    std::vector<EntryBuilder> parts;
    BadId bad_id;
    bool weighted = false;
  };

  int64_t Owners() const {
    return attrs_.row_placement ? attrs_.world_size : 1;
  }

  void BuildEntries(OpKernelContext* ctx, const IdLists<Tids>& lists,
                    Batch* batch) const {
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    const int64_t most = EntryBuilder::MaxSamples(attrs_);
    const int64_t parts =
        std::max({std::min({lists.ids / kIdsPerTask, lists.samples,
                            int64_t{pool->NumThreads()}}),
                  (lists.samples + most - 1) / most, int64_t{1}});
    for (int64_t i = 0; i < parts; ++i) {
      batch->parts.emplace_back(attrs_, ignore_bad_ids_);
    }
    pool->ParallelFor(parts, kNanosecondsPerId * (lists.ids / parts + 1),
                      [&](int64_t first, int64_t last) {
                        for (int64_t i = first; i < last; ++i) {
                          batch->parts[i].Build(
                              lists, lists.samples * i / parts,
                              lists.samples * (i + 1) / parts);
                        }
                      });
    for (const EntryBuilder& part : batch->parts) {
      if (!batch->bad_id.found) batch->bad_id = part.bad_id();
      batch->weighted |= part.has_weights();
    }
  }

  // Emits the entries of one owner; returns the message's size in bytes.
  size_t FillMessage(const Batch& batch, int64_t owner, float samples,
                     std::unique_ptr<MessageWriter>* message,
                     std::vector<int32_t>* sample_ids) const {
    std::vector<int64_t> begin;
    std::vector<int64_t> end;
    int64_t entries = 0;
    if (!batch.bad_id.found) {
      for (const EntryBuilder& part : batch.parts) {
        begin.push_back(part.Begin(owner));
        end.push_back(part.Begin(owner + 1));
        entries += end.back() - begin.back();
      }
    }
    message->reset(new MessageWriter(entries));
    sample_ids->resize(entries);
    int32_t* next = sample_ids->data();
    for (size_t i = 0; i < begin.size(); ++i) {
      next = batch.parts[i].Emit(begin[i], end[i], batch.weighted,
                                 message->get(), next);
    }
    sample_ids->resize(next - sample_ids->data());
    return (*message)->Finish(static_cast<int>(attrs_.rank), samples,
                              batch.weighted, batch.bad_id);
  }

  void WriteMessages(OpKernelContext* ctx, float samples, Batch* batch) const {
    const int64_t owners = Owners();
    std::vector<std::unique_ptr<MessageWriter>> messages(owners);
    std::vector<std::vector<int32_t>> sample_ids(owners);
    std::vector<int64_t> bytes(owners);
    int64_t entries = 0;
    for (const EntryBuilder& part : batch->parts) {
      entries += part.Begin(owners);
    }
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    const int64_t cost = kNanosecondsPerId * (entries / owners + 1);
    pool->ParallelFor(owners, cost, [&](int64_t first, int64_t last) {
      for (int64_t owner = first; owner < last; ++owner) {
        bytes[owner] = FillMessage(*batch, owner, samples, &messages[owner],
                                   &sample_ids[owner]);
      }
    });
    std::vector<int64_t> byte_ends;
    std::vector<int64_t> sample_ends;
    Tensor* payload = nullptr;
    Tensor* samples_out = nullptr;
    OP_REQUIRES_OK(ctx, Allocate(ctx, bytes, &byte_ends, 0, &payload));
    std::vector<int64_t> counts;
    for (const auto& ids : sample_ids) counts.push_back(ids.size());
    OP_REQUIRES_OK(ctx, Allocate(ctx, counts, &sample_ends, 2, &samples_out));
    auto* out = static_cast<uint8_t*>(payload->data());
    auto* ids_out = static_cast<int32_t*>(samples_out->data());
    pool->ParallelFor(owners, cost, [&](int64_t first, int64_t last) {
      for (int64_t owner = first; owner < last; ++owner) {
        messages[owner]->Write(out + byte_ends[owner] - bytes[owner]);
        std::copy(sample_ids[owner].begin(), sample_ids[owner].end(),
                  ids_out + sample_ends[owner] - counts[owner]);
      }
    });
  }

  // Allocates output `index` as the concatenation of parts of these sizes, and
  // output index + 1 as their splits over the ranks.
  absl::Status Allocate(OpKernelContext* ctx, const std::vector<int64_t>& sizes,
                        std::vector<int64_t>* ends, int index,
                        Tensor** output) const {
    int64_t total = 0;
    for (const int64_t size : sizes) ends->push_back(total += size);
    TF_RETURN_IF_ERROR(
        ctx->allocate_output(index, TensorShape({total}), output));
    Tensor* splits = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(
        index + 1, TensorShape({attrs_.world_size}), &splits));
    for (int64_t rank = 0; rank < attrs_.world_size; ++rank) {
      splits->vec<int64_t>()(rank) = sizes[attrs_.row_placement ? rank : 0];
    }
    return absl::OkStatus();
  }

  TableAttrs attrs_;
  bool ignore_bad_ids_ = false;
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
