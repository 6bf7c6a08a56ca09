// SPDX-License-Identifier: Apache-2.0
//
// One fused kernel per row optimizer: check, order the rows, update in place.
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/optimizer/row_order.h"
#include "custom_ops/optimizer/row_update_functor.h"
#include "custom_ops/optimizer/rule_inputs.h"
#include "custom_ops/optimizer/shard_access.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {
namespace {

template <typename Rule>
class ApplyRowsOp : public tf::OpKernel {
 public:
  explicit ApplyRowsOp(tf::OpKernelConstruction* ctx)
      : OpKernel(ctx), inputs_(ctx) {}

  void Compute(tf::OpKernelContext* ctx) override {
    const tf::Tensor* rows;
    const tf::Tensor* grads;
    OP_REQUIRES_OK(ctx, ctx->input("rows", &rows));
    OP_REQUIRES_OK(ctx, ctx->input("grads", &grads));
    Rule rule;
    OP_REQUIRES_OK(ctx, inputs_.Read(ctx, rows->NumElements(), &rule));
    Rounding rounding;
    OP_REQUIRES_OK(ctx, ReadRounding(ctx, &rounding));
    ShardAccess shard;
    const int num_slots = inputs_.NumSlots();
    OP_REQUIRES_OK(ctx, shard.Lock(ctx, 1 + num_slots));
    OP_REQUIRES_OK(ctx, CheckShapes(shard, *rows, *grads));
    OP_REQUIRES_OK(ctx, CheckRows(shard, *rows));
    OP_REQUIRES_OK(ctx, shard.PrepareToWrite(ctx));
    shard.UseHugePages();

    const RowBatch batch = {rows->flat<int64_t>().data(),
                            grads->flat<float>().data(), rows->NumElements(),
                            grads->dim_size(1)};
    const Work work = {rule, shard.Buffers(num_slots, rounding),
                       shard.tensor(0).dim_size(0)};
    if (StrictlyAscending(batch.rows, batch.size)) {
      Update(ctx, work, batch);
      return;
    }
    OP_REQUIRES(ctx, !HasMeans(rule),
                absl::InvalidArgumentError(
                    absl::StrCat(name(),
                                 ": rows must be strictly ascending when "
                                 "mean_squares are given")));
    UpdateRepeated(ctx, work, batch);
  }

 private:
  struct Work {
    Rule rule;
    RowBuffers buffers;
    int64_t num_rows;  // of the table
  };

  absl::Status CheckShapes(const ShardAccess& shard, const tf::Tensor& rows,
                           const tf::Tensor& grads) const {
    const tf::TensorShape& table = shard.tensor(0).shape();
    if (table.dims() != 2 || rows.dims() != 1 || grads.dims() != 2 ||
        grads.dim_size(0) != rows.dim_size(0) ||
        grads.dim_size(1) != table.dim_size(1)) {
      return absl::InvalidArgumentError(absl::StrCat(
          name(),
          ": rows [n] and grads [n, dim] must fit the table [rows, "
          "dim]; received rows ",
          rows.shape().DebugString(), ", grads ", grads.shape().DebugString(),
          ", table ", table.DebugString(), " (", shard.name(0), ")"));
    }
    const tf::TensorShape slot_shape =
        std::is_same<Rule, RowWiseAdagradRule>::value
            ? tf::TensorShape({table.dim_size(0)})
            : table;
    for (int i = 1; i <= inputs_.NumSlots(); ++i) {
      if (shard.tensor(i).shape() != slot_shape) {
        return absl::InvalidArgumentError(
            absl::StrCat(name(), ": slot ", shard.name(i), " must have shape ",
                         slot_shape.DebugString(), "; received ",
                         shard.tensor(i).shape().DebugString()));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckRows(const ShardAccess& shard,
                         const tf::Tensor& rows) const {
    const int64_t num_rows = shard.tensor(0).dim_size(0);
    const int64_t* data = rows.flat<int64_t>().data();
    const int64_t outside = FirstRowOutside(data, rows.NumElements(), num_rows);
    if (outside < 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(name(), ": row ", data[outside], " at position ", outside,
                     " is outside the ", num_rows, " rows of ", shard.name(0)));
  }

  static bool HasMeans(const RowWiseAdagradRule& rule) {
    return rule.mean_squares != nullptr;
  }
  template <typename Other>
  static bool HasMeans(const Other&) {
    return false;
  }

  // Rough cycles per row: the memory of a row and its slots dominates.
  int64_t CostPerRow(int64_t dim) const {
    return 50 + dim * (1 + inputs_.NumSlots());
  }

  template <typename Function>
  void Parallel(tf::OpKernelContext* ctx, int64_t rows, int64_t cost,
                const Function& function) const {
    ParallelUnits(ctx->device()->tensorflow_cpu_worker_threads()->workers, rows,
                  cost, function);
  }

  void Update(tf::OpKernelContext* ctx, const Work& work,
              const RowBatch& batch) const {
    if constexpr (std::is_same<Rule, AdamRule>::value) {
      if (inputs_.all_rows) {
        Parallel(ctx, work.num_rows, CostPerRow(batch.dim),
                 [&](int64_t begin, int64_t end) {
                   work.rule.ApplyToAll(batch, work.buffers, begin, end);
                 });
        return;
      }
    }
    Parallel(ctx, batch.size, CostPerRow(batch.dim),
             [&](int64_t begin, int64_t end) {
               work.rule.Apply(batch, work.buffers, begin, end);
             });
  }

  // Rows that repeat or are not sorted: sum the gradients of each row first,
  // so that a row is updated once with its whole gradient.
  void UpdateRepeated(tf::OpKernelContext* ctx, const Work& work,
                      const RowBatch& batch) const {
    OP_REQUIRES_OK(ctx, CheckSortable(name(), batch.size));
    const UniqueRows unique(batch.rows, batch.size);
    tf::Tensor sums;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tf::DT_FLOAT,
                                           {unique.size(), batch.dim}, &sums));
    float* data = sums.flat<float>().data();
    Parallel(ctx, unique.size(), CostPerRow(batch.dim),
             [&](int64_t begin, int64_t end) {
               SumRepeated(unique, batch.grads, batch.dim, begin, end,
                           data + begin * batch.dim);
             });
    Update(ctx, work, {unique.rows(), data, unique.size(), batch.dim});
  }

  RuleInputs<Rule> inputs_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>ApplyRowSgd")
                            .Device(tf::DEVICE_CPU)
                            .TypeConstraint<float>("T"),
                        ApplyRowsOp<SgdRule>);

REGISTER_KERNEL_BUILDER(Name("Tfdist>ApplyRowMomentum")
                            .Device(tf::DEVICE_CPU)
                            .TypeConstraint<float>("T"),
                        ApplyRowsOp<MomentumRule>);

REGISTER_KERNEL_BUILDER(Name("Tfdist>ApplyRowAdagrad")
                            .Device(tf::DEVICE_CPU)
                            .TypeConstraint<float>("T"),
                        ApplyRowsOp<AdagradRule>);

REGISTER_KERNEL_BUILDER(Name("Tfdist>ApplyRowWiseAdagrad")
                            .Device(tf::DEVICE_CPU)
                            .TypeConstraint<float>("T"),
                        ApplyRowsOp<RowWiseAdagradRule>);

REGISTER_KERNEL_BUILDER(Name("Tfdist>ApplyRowAdam")
                            .Device(tf::DEVICE_CPU)
                            .TypeConstraint<float>("T"),
                        ApplyRowsOp<AdamRule>);

REGISTER_KERNEL_BUILDER(Name("Tfdist>ApplyRowFtrl")
                            .Device(tf::DEVICE_CPU)
                            .TypeConstraint<float>("T"),
                        ApplyRowsOp<FtrlRule>);

}  // namespace
}  // namespace tfdist
