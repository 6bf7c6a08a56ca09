// SPDX-License-Identifier: Apache-2.0
//
// One fused kernel per row optimizer: checks and sorts the rows, and updates
// them in place.
#include <type_traits>

#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/optimizer/shard_access.h"
#include "custom_ops/optimizer/update_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {
namespace {

template <typename Rule>
class ApplyRowsOp : public tf::OpKernel {
 public:
  explicit ApplyRowsOp(tf::OpKernelConstruction* ctx)
      : OpKernel(ctx), inputs_(ctx) {}

  void Compute(tf::OpKernelContext* ctx) override {
    UpdateInputs<Rule> given;
    ShardAccess shard;
    OP_REQUIRES_OK(ctx, given.Read(ctx, name(), &inputs_, &shard));
    if (WritesAllRows()) {
      OP_REQUIRES_OK(ctx, shard.PrepareToWrite(ctx));
    } else {
      OP_REQUIRES_OK(ctx, shard.PrepareToWriteRows(ctx));
      shard.WillWrite(given.batch.rows, given.batch.size);
    }
    shard.UseHugePages();
    const Work work = {given.rule,
                       shard.Buffers(inputs_.NumSlots(), given.rounding),
                       given.num_rows};
    if (given.ascending) {
      Update(ctx, work, given.batch);
    } else {
      UpdateRepeated(ctx, work, given.batch);
    }
  }

 private:
  struct Work {
    Rule rule;
    RowBuffers buffers;
    int64_t num_rows;  // of the table
  };

  bool WritesAllRows() const {
    if constexpr (std::is_same<Rule, AdamRule>::value) return inputs_.all_rows;
    return false;
  }

  // Returns the approximate cycles per row. Memory accesses of the row and its
  // slots dominate.
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

  // Updates rows that are duplicate or not sorted. Sums the gradients of each
  // row first, so that each row is updated once with its full gradient.
  void UpdateRepeated(tf::OpKernelContext* ctx, const Work& work,
                      const RowBatch& batch) const {
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
