// SPDX-License-Identifier: Apache-2.0
//
// One fused kernel per row optimizer: check, order the rows, update in place.
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/optimizer/row_order.h"
#include "custom_ops/optimizer/row_update_functor.h"
#include "custom_ops/optimizer/rule_inputs.h"
#include "custom_ops/optimizer/shard_access.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tfdist {
namespace {

template <typename Rule>
class ApplyRowsOp : public tf::OpKernel {
 public:
  explicit ApplyRowsOp(tf::OpKernelConstruction* context)
      : OpKernel(context), inputs_(context) {}

  void Compute(tf::OpKernelContext* context) override {
    const tf::Tensor* rows;
    const tf::Tensor* grads;
    OP_REQUIRES_OK(context, context->input("rows", &rows));
    OP_REQUIRES_OK(context, context->input("grads", &grads));
    Rule rule;
    OP_REQUIRES_OK(context, inputs_.Read(context, rows->NumElements(), &rule));
    ShardAccess shard;
    const int num_slots = inputs_.NumSlots();
    OP_REQUIRES_OK(context, shard.Lock(context, 1 + num_slots));
    OP_REQUIRES_OK(context, CheckShapes(shard, *rows, *grads));
    OP_REQUIRES_OK(context, CheckRows(shard, *rows));
    OP_REQUIRES_OK(context, shard.PrepareToWrite(context));

    RowBatch batch = {rows->flat<int64_t>().data(), grads->flat<float>().data(),
                      rows->NumElements(), grads->dim_size(1)};
    RowBuffers buffers = {};
    buffers.table = shard.data(0);
    for (int i = 0; i < num_slots; ++i) buffers.slots[i] = shard.data(1 + i);
    if (StrictlyAscending(batch.rows, batch.size)) {
      Update(context, rule, batch, buffers);
      return;
    }
    OP_REQUIRES(context, !HasMeans(rule),
                absl::InvalidArgumentError(
                    absl::StrCat(name(),
                                 ": rows must be strictly ascending when "
                                 "mean_squares are given")));
    UpdateGrouped(context, rule, batch, buffers);
  }

 private:
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

  void Update(tf::OpKernelContext* context, const Rule& rule,
              const RowBatch& batch, const RowBuffers& buffers) const {
    const auto& workers = *context->device()->tensorflow_cpu_worker_threads();
    tf::Shard(workers.num_threads, workers.workers, batch.size,
              CostPerRow(batch.dim), [&](int64_t begin, int64_t end) {
                rule.Apply(batch, buffers, begin, end);
              });
  }

  // Rows that repeat or are not sorted: sum the gradients of each row first,
  // so that a row is updated once with its whole gradient.
  void UpdateGrouped(tf::OpKernelContext* context, const Rule& rule,
                     const RowBatch& batch, const RowBuffers& buffers) const {
    const RowGroups groups = GroupRows(batch.rows, batch.size);
    const auto num_groups = static_cast<int64_t>(groups.rows.size());
    tf::Tensor sums;
    OP_REQUIRES_OK(context, context->allocate_temp(
                                tf::DT_FLOAT, {num_groups, batch.dim}, &sums));
    float* data = sums.flat<float>().data();
    const RowBatch grouped = {groups.rows.data(), data, num_groups, batch.dim};
    const auto& workers = *context->device()->tensorflow_cpu_worker_threads();
    tf::Shard(workers.num_threads, workers.workers, num_groups,
              2 * CostPerRow(batch.dim), [&](int64_t begin, int64_t end) {
                SumGroups(groups, batch.grads, batch.dim, begin, end,
                          data + begin * batch.dim);
                rule.Apply(grouped, buffers, begin, end);
              });
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

}  // namespace
}  // namespace tfdist
