// SPDX-License-Identifier: Apache-2.0
//
// LookupGrad and a row update in one op per optimizer: the gradients of a few
// rows at a time are summed and applied, so that they stay in the cache. The
// result is that of LookupGrad followed by ApplyRow*. The inputs are
//   those of LookupGrad
//   tables           resource variables [num_rows, dim], float or bfloat16
//   slots            a list of resource variables for each slot of the
//   optimizer
// then the scalar hyperparameters of ApplyRow*, and
//   rounding_seeds   one seed per table, or none
// If an input is invalid, nothing is written.
#include <algorithm>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/lookup/entry_sorter.h"
#include "custom_ops/lookup/lookup_grad_functor.h"
#include "custom_ops/lookup/parallel_segments.h"
#include "custom_ops/optimizer/shard_access.h"
#include "custom_ops/optimizer/update_inputs.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {
namespace {

namespace tf = ::tensorflow;

#define TFDIST_UPDATE_OP(name, more_inputs)                      \
  REGISTER_OP(name)                                              \
      .Input("row_splits: int64")                                \
      .Input("rows: int64")                                      \
      .Input("weights: float")                                   \
      .Input("served: int64")                                    \
      .Input("grad: float")                                      \
      .Input("tables: N * resource")                             \
          more_inputs.Input("rounding_seeds: num_seeds * int64") \
      .Attr("N: int >= 1")                                       \
      .Attr("num_seeds: int >= 0 = 0")                           \
      .Attr("feature_tables: list(int)")                         \
      .SetIsStateful()                                           \
      .SetShapeFn(tf::shape_inference::NoOutputs)

TFDIST_UPDATE_OP("Tfdist>ApplyLookupGradSgd", .Input("learning_rate: double"));

TFDIST_UPDATE_OP("Tfdist>ApplyLookupGradMomentum",
                 .Input("velocity: N * resource")
                     .Input("learning_rate: double")
                     .Input("momentum: double"))
    .Attr("nesterov: bool = false");

TFDIST_UPDATE_OP("Tfdist>ApplyLookupGradAdagrad",
                 .Input("accumulator: N * resource")
                     .Input("learning_rate: double")
                     .Input("epsilon: double"));

TFDIST_UPDATE_OP("Tfdist>ApplyLookupGradRowWiseAdagrad",
                 .Input("accumulator: N * resource")
                     .Input("learning_rate: double")
                     .Input("epsilon: double"));

TFDIST_UPDATE_OP("Tfdist>ApplyLookupGradAdam",
                 .Input("momentum: N * resource")
                     .Input("velocity: N * resource")
                     .Input("velocity_hats: num_hats * resource")
                     .Input("learning_rate: double")
                     .Input("beta_1: double")
                     .Input("beta_2: double")
                     .Input("epsilon: double")
                     .Input("step: int64"))
    .Attr("num_hats: int >= 0 = 0");

TFDIST_UPDATE_OP("Tfdist>ApplyLookupGradFtrl",
                 .Input("accumulator: N * resource")
                     .Input("linear: N * resource")
                     .Input("learning_rate: double")
                     .Input("learning_rate_power: double")
                     .Input("l1: double")
                     .Input("l2: double")
                     .Input("l2_shrinkage: double")
                     .Input("beta: double"));

constexpr int kGradInputs = 5;  // the inputs of LookupGrad

template <typename Rule>
class ApplyLookupGradOp : public tf::OpKernel {
 public:
  explicit ApplyLookupGradOp(tf::OpKernelConstruction* ctx)
      : OpKernel(ctx), inputs_(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &count_));
    OP_REQUIRES_OK(ctx, ReadFeatureTables(ctx, count_, &feature_tables_));
  }

  void Compute(tf::OpKernelContext* ctx) override {
    Rule rule;
    std::vector<Rounding> roundings;
    ShardAccess shard;
    TableShapes shapes;
    std::vector<TableEntries> tables;
    OP_REQUIRES_OK(ctx, inputs_.Read(ctx, &rule));
    OP_REQUIRES_OK(ctx, ReadRoundings(ctx, count_, &roundings));
    OP_REQUIRES_OK(ctx,
                   shard.Lock(ctx, kGradInputs, count_, inputs_.NumSlots()));
    OP_REQUIRES_OK(ctx, ReadShapes(shard, &shapes));
    OP_REQUIRES_OK(ctx,
                   FindTableEntries(ctx, feature_tables_, shapes, &tables));
    std::vector<RowBuffers> buffers;
    const auto update = [&](size_t first, size_t end,
                            const std::vector<SortedRange>& ranges) {
      // The sorter has checked all rows before its first call.
      if (buffers.empty()) {
        TF_RETURN_IF_ERROR(shard.PrepareToWriteRows(ctx));
        shard.UseHugePages();
        for (int t = 0; t < count_; ++t) {
          buffers.push_back(shard.Buffers(inputs_.NumSlots(), roundings[t], t));
        }
      }
      for (const SortedRange& range : ranges) {
        shard.WillWrite(range.entries->rows(), range.entries->unique(),
                        static_cast<int>(range.table));
      }
      Update(ctx, rule, buffers, shapes.widths, ranges);
      return absl::OkStatus();
    };
    OP_REQUIRES_OK(ctx, sorter_.Run(ctx, tables, update));
  }

 private:
  absl::Status ReadShapes(const ShardAccess& shard, TableShapes* shapes) const {
    for (int t = 0; t < count_; ++t) {
      const tf::TensorShape& shape = shard.tensor(0, t).shape();
      if (shape.dims() != 2) {
        return absl::InvalidArgumentError(
            absl::StrCat(name(), ": table ", shard.name(0, t),
                         " must be a matrix; received ", shape.DebugString()));
      }
      TF_RETURN_IF_ERROR(
          CheckSlots<Rule>(name(), inputs_.NumSlots(), shard, t));
      shapes->rows.push_back(shape.dim_size(0));
      shapes->widths.push_back(shape.dim_size(1));
    }
    return absl::OkStatus();
  }

  void Update(tf::OpKernelContext* ctx, const Rule& rule,
              const std::vector<RowBuffers>& buffers,
              const std::vector<int64_t>& widths,
              const std::vector<SortedRange>& ranges) const {
    std::vector<Task> tasks;
    for (const SortedRange& range : ranges) {
      const int64_t unique = range.entries->unique();
      const int64_t width = widths[range.table];
      // A nanosecond for some numbers, and cache misses for each row.
      tasks.push_back({unique + range.entries->row_splits()[unique],
                       10 + width * (1 + inputs_.NumSlots()) / 8});
    }
    const auto* grad = static_cast<const float*>(ctx->input(4).data());
    ParallelTasks(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                  tasks, [&](size_t i, int64_t low, int64_t high) {
                    const SortedRange& range = ranges[i];
                    const SortedEntries& entries = *range.entries;
                    const int64_t* splits = entries.row_splits();
                    const int64_t unique = entries.unique();
                    const int64_t begin = SegmentAtWork(splits, unique, low);
                    const int64_t end = SegmentAtWork(splits, unique, high);
                    UpdateRange(rule, buffers[range.table], widths[range.table],
                                grad, entries, begin, end);
                  });
  }

  // Sums and applies the gradients of rows [begin, end) of a range, a few rows
  // at a time.
  static void UpdateRange(const Rule& rule, const RowBuffers& buffers,
                          int64_t width, const float* grad,
                          const SortedEntries& entries, int64_t begin,
                          int64_t end) {
    constexpr int64_t kMostRows = 64;
    constexpr int64_t kMostNumbers = 2048;
    if (begin >= end || width == 0) return;
    float numbers[kMostNumbers];
    std::vector<float> wide(width > kMostNumbers ? width : 0);
    float* sums = wide.empty() ? numbers : wide.data();
    const int64_t step =
        std::clamp<int64_t>(kMostNumbers / width, 1, kMostRows);
    for (int64_t first = begin; first < end; first += step) {
      const int64_t size = std::min(step, end - first);
      RowGradSumCpu({grad, width, entries.row_splits() + first,
                     entries.entries(), entries.weights(), sums},
                    0, size);
      rule.Apply({entries.rows() + first, sums, end - first, width}, buffers, 0,
                 size);
    }
  }

  int count_ = 0;
  std::vector<int64_t> feature_tables_;
  RuleInputs<Rule> inputs_;
  EntrySorter sorter_;
};

#define TFDIST_REGISTER_KERNEL(name, Rule)                        \
  REGISTER_KERNEL_BUILDER(                                        \
      Name("Tfdist>ApplyLookupGrad" name).Device(tf::DEVICE_CPU), \
      ApplyLookupGradOp<Rule>)

TFDIST_REGISTER_KERNEL("Sgd", SgdRule);
TFDIST_REGISTER_KERNEL("Momentum", MomentumRule);
TFDIST_REGISTER_KERNEL("Adagrad", AdagradRule);
TFDIST_REGISTER_KERNEL("RowWiseAdagrad", RowWiseAdagradRule);
TFDIST_REGISTER_KERNEL("Adam", AdamRule);
TFDIST_REGISTER_KERNEL("Ftrl", FtrlRule);

}  // namespace
}  // namespace tfdist
