// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "feature_grid.h"
#include "hot_ids.h"
#include "id_lists.h"
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

REGISTER_OP("Tfdist>SplitHotIds")
    .Input("ids: N * Tids")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Output("cold_ids: Tids")
    .Output("cold_row_splits: int64")
    .Output("cold_weights: float")
    .Output("hot_samples: int32")
    .Output("hot_row_splits: int64")
    .Output("hot_rows: int64")
    .Output("hot_weights: float")
    .Attr("N: int >= 1")
    .Attr("Tids: {int32, int64}")
    .Attr("hot_ids: list(int) >= 1")
    .Attr("first_row: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      int lists;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &lists));
      for (int i = 0; i < c->num_outputs(); ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      c->set_output(1, c->input(lists));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Tells the ids whose rows every rank holds from those that travel.

The lists of a batch are merged per sample. An id that is out of range is cold:
the exchange reports it.

ids: N lists of ids, each [n_i].
row_splits: N offset vectors, each [b + 1].
weights: N vectors, each [n_i], or [0] when all weights are 1.
cold_ids: [n], the ids that are not hot.
cold_row_splits: [b + 1], offsets of all samples in them.
cold_weights: [n], or [0] when all weights are 1.
hot_samples: [m], the samples that have hot ids, ascending.
hot_row_splits: [m + 1], offsets of these samples in hot_rows.
hot_rows: [h], first_row plus the index of the id among hot_ids.
hot_weights: [h], or [0] when all weights are 1.
hot_ids: distinct ids, at most 65536.
)doc");

template <typename Tids>
class SplitHotIdsOp : public OpKernel {
 public:
  explicit SplitHotIdsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("first_row", &first_row_));
    std::vector<int64_t> hot_ids;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("hot_ids", &hot_ids));
    FeatureGrid grid;
    grid.name = name();
    grid.vocabulary_size = RotatedMod::kMaxRows;
    OP_REQUIRES_OK(ctx, index_.Build(hot_ids.data(), hot_ids.size(), grid));
  }

  void Compute(OpKernelContext* ctx) override {
    IdLists<Tids> lists;
    const IdInputs inputs(ctx);
    OP_REQUIRES_OK(ctx, ReadIdLists(inputs, 0, ctx->num_inputs() / 3, &lists));
    // As large as each can become, and cut when the ids are told apart.
    const int64_t weights = lists.weighted ? lists.ids : 0;
    const int64_t sizes[] = {lists.ids,     lists.samples + 1, weights,
                             lists.samples, lists.samples + 1, lists.ids,
                             weights};
    Tensor outputs[7];
    for (int i = 0; i < 7; ++i) {
      OP_REQUIRES_OK(ctx,
                     ctx->allocate_temp(ctx->expected_output_dtype(i),
                                        TensorShape({sizes[i]}), &outputs[i]));
    }
    const Counts found = lists.weighted ? Split<true>(lists, outputs)
                                        : Split<false>(lists, outputs);
    const int64_t cold = lists.ids - found.hot;
    const int64_t filled[] = {cold,
                              lists.samples + 1,
                              lists.weighted ? cold : 0,
                              found.samples,
                              found.samples + 1,
                              found.hot,
                              lists.weighted ? found.hot : 0};
    for (int i = 0; i < 7; ++i) {
      ctx->set_output(i, outputs[i].Slice(0, filled[i]));
    }
  }

 private:
  struct Counts {
    int64_t hot = 0;
    int64_t samples = 0;  // that have hot ids
  };

  // Writes every id to both lists and then advances one of them: which one is
  // unpredictable, so no branch depends on it.
  template <bool kWeighted>
  Counts Split(const IdLists<Tids>& lists, Tensor* outputs) const {
    auto* cold_ids = outputs[0].vec<Tids>().data();
    auto* cold_splits = outputs[1].vec<int64_t>().data();
    auto* cold_weights = outputs[2].vec<float>().data();
    auto* samples = outputs[3].vec<int32_t>().data();
    auto* hot_splits = outputs[4].vec<int64_t>().data();
    auto* hot_rows = outputs[5].vec<int64_t>().data();
    auto* hot_weights = outputs[6].vec<float>().data();
    Counts found;
    int64_t cold = 0;
    cold_splits[0] = hot_splits[0] = 0;
    for (int64_t sample = 0; sample < lists.samples; ++sample) {
      const int64_t before = found.hot;
      for (const auto& list : lists.lists) {
        for (int64_t i = list.row_splits[sample];
             i < list.row_splits[sample + 1]; ++i) {
          const uint64_t place =
              index_.Find(static_cast<int64_t>(list.ids[i]), kCold);
          cold_ids[cold] = list.ids[i];
          hot_rows[found.hot] = first_row_ + static_cast<int64_t>(place);
          if constexpr (kWeighted) {
            const float weight = list.weights ? list.weights[i] : 1.0f;
            cold_weights[cold] = hot_weights[found.hot] = weight;
          }
          cold += place == kCold;
          found.hot += place != kCold;
        }
      }
      cold_splits[sample + 1] = cold;
      if (found.hot == before) continue;
      samples[found.samples++] = static_cast<int32_t>(sample);
      hot_splits[found.samples] = found.hot;
    }
    return found;
  }

  static constexpr uint64_t kCold = uint64_t{1} << 62;

  HotIndex index_;
  int64_t first_row_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>SplitHotIds")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<int32_t>("Tids"),
                        SplitHotIdsOp<int32_t>);
REGISTER_KERNEL_BUILDER(Name("Tfdist>SplitHotIds")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<int64_t>("Tids"),
                        SplitHotIdsOp<int64_t>);

}  // namespace
}  // namespace tfdist
