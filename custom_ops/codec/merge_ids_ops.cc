// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "custom_ops/codec/bad_id.h"
#include "custom_ops/codec/id_lists.h"
#include "custom_ops/common/allocate_output.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>MergeIds")
    .Input("ids: N * Tids")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Output("merged_row_splits: int64")
    .Output("rows: int64")
    .Output("merged_weights: float")
    .Attr("N: int >= 1")
    .Attr("Tids: {int32, int64}")
    .Attr("vocabulary_size: int >= 1")
    .Attr("out_of_range: {'error', 'ignore'} = 'error'")
    .Attr("layer: string = ''")
    .SetShapeFn([](InferenceContext* c) {
      int lists;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &lists));
      c->set_output(0, c->input(lists));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Merges the lists of ids of a batch, for a table that only this rank has.

The results are those of EncodeIds and DecodeIds on one rank, with the same
policy for invalid ids and the same error. Duplicates are not combined.

ids: N lists of ids, each [n_i].
row_splits: N vectors of offsets, each [b + 1].
weights: N vectors, each [n_i], or [0] if all weights are 1.
merged_row_splits: [b + 1], offsets of the samples in `rows`.
rows: [n], valid ids. A single list of valid ids is returned without a copy.
merged_weights: [n], or [0] if all weights are 1.
)doc");

template <typename Tids>
class MergeIdsOp : public OpKernel {
 public:
  explicit MergeIdsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("vocabulary_size", &vocabulary_size_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("layer", &layer_));
    std::string out_of_range;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("out_of_range", &out_of_range));
    ignore_bad_ids_ = out_of_range == "ignore";
  }

  void Compute(OpKernelContext* ctx) override {
    IdLists<Tids> lists;
    const IdInputs inputs(ctx);
    OP_REQUIRES_OK(ctx, ReadIdLists(inputs, 0, ctx->num_inputs() / 3, &lists));
    const int64_t bad_ids = CountBadIds(lists);
    if (bad_ids > 0 && !ignore_bad_ids_) {
      ctx->SetStatus(
          BadIdError(layer_, 0, FirstBadId(lists), vocabulary_size_));
      return;
    }
    if (lists.lists.size() == 1 && bad_ids == 0) {
      PassOn(ctx);
    } else {
      Merge(ctx, lists, lists.ids - bad_ids);
    }
  }

 private:
  bool IsBad(Tids id) const {
    return static_cast<uint64_t>(static_cast<int64_t>(id)) >=
           static_cast<uint64_t>(vocabulary_size_);
  }

  int64_t CountBadIds(const IdLists<Tids>& lists) const {
    int64_t bad_ids = 0;
    for (const auto& list : lists.lists) {
      const int64_t count = list.row_splits[lists.samples];
      for (int64_t i = 0; i < count; ++i) bad_ids += IsBad(list.ids[i]);
    }
    return bad_ids;
  }

  // Returns the first invalid id in the order of EncodeIds: samples first, then
  // lists.
  BadId FirstBadId(const IdLists<Tids>& lists) const {
    for (int64_t sample = 0; sample < lists.samples; ++sample) {
      for (const auto& list : lists.lists) {
        for (int64_t i = list.row_splits[sample];
             i < list.row_splits[sample + 1]; ++i) {
          if (IsBad(list.ids[i])) return {true, 0, sample, list.ids[i]};
        }
      }
    }
    return {};
  }

  void PassOn(OpKernelContext* ctx) const {
    const Tensor& ids = ctx->input(0);
    ctx->set_output(0, ctx->input(1));
    ctx->set_output(2, ctx->input(2));
    if (ids.dtype() == tensorflow::DT_INT64) {
      ctx->set_output(1, ids);
      return;
    }
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, ids.shape(), &rows));
    const auto from = ids.vec<Tids>();
    std::copy_n(from.data(), from.size(), rows->vec<int64_t>().data());
  }

  void Merge(OpKernelContext* ctx, const IdLists<Tids>& lists,
             int64_t count) const {
    Tensor* row_splits = nullptr;
    Tensor* rows = nullptr;
    Tensor* weights = nullptr;
    OP_REQUIRES_OK(ctx,
                   AllocateOutput(ctx, 0, {lists.samples + 1}, &row_splits));
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {count}, &rows));
    OP_REQUIRES_OK(
        ctx, AllocateOutput(ctx, 2, {lists.weighted ? count : 0}, &weights));
    int64_t* next_split = row_splits->vec<int64_t>().data();
    int64_t* rows_out = rows->vec<int64_t>().data();
    float* weights_out = weights->vec<float>().data();
    int64_t next = 0;
    *next_split++ = 0;
    for (int64_t sample = 0; sample < lists.samples; ++sample) {
      for (const auto& list : lists.lists) {
        for (int64_t i = list.row_splits[sample];
             i < list.row_splits[sample + 1]; ++i) {
          if (IsBad(list.ids[i])) continue;
          if (lists.weighted) {
            weights_out[next] = list.weights ? list.weights[i] : 1.0f;
          }
          rows_out[next++] = list.ids[i];
        }
      }
      *next_split++ = next;
    }
  }

  int64_t vocabulary_size_ = 0;
  bool ignore_bad_ids_ = false;
  std::string layer_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>MergeIds")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<int32_t>("Tids"),
                        MergeIdsOp<int32_t>);
REGISTER_KERNEL_BUILDER(Name("Tfdist>MergeIds")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<int64_t>("Tids"),
                        MergeIdsOp<int64_t>);

}  // namespace
}  // namespace tfdist
