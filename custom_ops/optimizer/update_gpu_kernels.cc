// SPDX-License-Identifier: Apache-2.0
//
// Row updates on a GPU. The table, its slots and the gradients are in device
// memory; rows and hyperparameters are in host memory.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "custom_ops/lookup/segment_sum_gpu.h"
#include "custom_ops/optimizer/clip_inputs.h"
#include "custom_ops/optimizer/gpu_shard.h"
#include "custom_ops/optimizer/row_update_functor_gpu.h"
#include "custom_ops/optimizer/sum_duplicates_kernel.h"
#include "custom_ops/optimizer/table_inputs.h"
#include "custom_ops/optimizer/update_inputs.h"

namespace tfdist {
namespace {

// Computes sums[k], the sum of the gradients of unique row k in the order of
// the batch, as a lookup in the gradients.
absl::Status SumRepeated(const UniqueRows& unique, const RowBatch& batch,
                         GpuWork* work, float* sums) {
  std::vector<int64_t> splits(unique.size() + 1);
  for (int64_t k = 0; k <= unique.size(); ++k) {
    splits[k] = unique.positions(k) - unique.positions(0);
  }
  const std::vector<int64_t> positions(unique.positions(0),
                                       unique.positions(unique.size()));
  const SegmentSum sum = {batch.grads,      batch.dim, splits.data(),
                          positions.data(), nullptr,   sums};
  return SumSegmentsGpu(sum, batch.size, unique.size(), work);
}

template <typename Rule>
class ApplyRowsGpuOp : public tf::OpKernel {
 public:
  explicit ApplyRowsGpuOp(tf::OpKernelConstruction* ctx)
      : OpKernel(ctx), inputs_(ctx) {}

  void Compute(tf::OpKernelContext* ctx) override {
    ShardAccess shard;
    UpdateInputs<Rule> given;
    OP_REQUIRES_OK(ctx, given.Read(ctx, name(), &inputs_, &shard));
    GpuWork work(ctx);
    OP_REQUIRES_OK(ctx, PrepareToWrite(ctx, work, &shard));
    GpuRows rows = {given.batch,
                    shard.Buffers(inputs_.NumSlots(), given.rounding),
                    // The pointer bad_row is not needed, because the rows are
                    // checked.
                    given.num_rows, nullptr};
    if (given.ascending) {
      OP_REQUIRES_OK(ctx, UploadRows(given.batch.rows, given.batch.size, &work,
                                     &rows.batch.rows));
    } else {
      OP_REQUIRES_OK(ctx, MakeUnique(given.batch, &work, &rows.batch));
    }
    OP_REQUIRES_OK(ctx, work.Launched(Launch(rows, given.rule, work.stream())));
  }

 private:
  static absl::Status MakeUnique(const RowBatch& repeated, GpuWork* work,
                                 RowBatch* batch) {
    const UniqueRows unique(repeated.rows, repeated.size);
    float* sums = nullptr;
    TF_RETURN_IF_ERROR(work->Allocate(unique.size() * repeated.dim, &sums));
    TF_RETURN_IF_ERROR(SumRepeated(unique, repeated, work, sums));
    batch->grads = sums;
    batch->size = unique.size();
    return UploadRows(unique.rows(), unique.size(), work, &batch->rows);
  }

  int Launch(const GpuRows& rows, const Rule& rule, void* stream) const {
    if constexpr (std::is_same<Rule, AdamRule>::value) {
      if (inputs_.all_rows) return ApplyAllRowsGpu(rows, rule, stream);
    }
    return ApplyRowsGpu(rows, rule, stream);
  }

  RuleInputs<Rule> inputs_;
};

class ClipRowsGpuOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tf::OpKernelContext* ctx) override {
    ShardAccess shard;
    ClipInputs given;
    OP_REQUIRES_OK(ctx, shard.Lock(ctx, 0));
    OP_REQUIRES_OK(ctx, given.Read(ctx, name(), shard));
    GpuWork work(ctx);
    OP_REQUIRES_OK(ctx, PrepareToWrite(ctx, work, &shard));
    GpuRows rows = {given.batch, shard.Buffers(0, given.rounding),
                    // The pointer bad_row is not needed, because the rows are
                    // checked.
                    shard.tensor(0).dim_size(0), nullptr};
    OP_REQUIRES_OK(ctx, UploadRows(given.batch.rows, given.batch.size, &work,
                                   &rows.batch.rows));
    OP_REQUIRES_OK(ctx,
                   work.Launched(ClipRowsGpu(rows, given.rule, work.stream())));
  }
};

class ScaleTableGpuOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tf::OpKernelContext* ctx) override {
    float factor = 0;
    Rounding rounding;
    ShardAccess shard;
    OP_REQUIRES_OK(ctx, ReadScale(ctx, name(), &factor, &rounding));
    OP_REQUIRES_OK(ctx, shard.Lock(ctx, 0));
    GpuWork work(ctx);
    OP_REQUIRES_OK(ctx, PrepareToWrite(ctx, work, &shard));
    const MatrixSize size = shard.TableSize();
    OP_REQUIRES_OK(
        ctx, work.Launched(ScaleRowsGpu(shard.Buffers(0, rounding), size.rows,
                                        size.dim, factor, work.stream())));
  }
};

class SumDuplicateRowsGpuOp : public SumDuplicatesKernel {
 public:
  using SumDuplicatesKernel::SumDuplicatesKernel;

 protected:
  absl::Status Sum(tf::OpKernelContext* ctx, const UniqueRows& unique,
                   const RowBatch& batch, float* sums) const override {
    GpuWork work(ctx);
    return SumRepeated(unique, batch, &work, sums);
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>ApplyRowSgd")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("table")
                            .HostMemory("rows")
                            .HostMemory("learning_rate")
                            .HostMemory("rounding_seeds"),
                        ApplyRowsGpuOp<SgdRule>);

REGISTER_KERNEL_BUILDER(Name("Tfdist>ApplyRowMomentum")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("table")
                            .HostMemory("velocity")
                            .HostMemory("rows")
                            .HostMemory("learning_rate")
                            .HostMemory("momentum")
                            .HostMemory("rounding_seeds"),
                        ApplyRowsGpuOp<MomentumRule>);

REGISTER_KERNEL_BUILDER(Name("Tfdist>ApplyRowAdagrad")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("table")
                            .HostMemory("accumulator")
                            .HostMemory("rows")
                            .HostMemory("learning_rate")
                            .HostMemory("epsilon")
                            .HostMemory("rounding_seeds"),
                        ApplyRowsGpuOp<AdagradRule>);

REGISTER_KERNEL_BUILDER(Name("Tfdist>ApplyRowWiseAdagrad")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("table")
                            .HostMemory("accumulator")
                            .HostMemory("rows")
                            .HostMemory("learning_rate")
                            .HostMemory("epsilon")
                            .HostMemory("rounding_seeds"),
                        ApplyRowsGpuOp<RowWiseAdagradRule>);

REGISTER_KERNEL_BUILDER(Name("Tfdist>ApplyRowAdam")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("table")
                            .HostMemory("momentum")
                            .HostMemory("velocity")
                            .HostMemory("velocity_hats")
                            .HostMemory("rows")
                            .HostMemory("learning_rate")
                            .HostMemory("beta_1")
                            .HostMemory("beta_2")
                            .HostMemory("epsilon")
                            .HostMemory("step")
                            .HostMemory("rounding_seeds"),
                        ApplyRowsGpuOp<AdamRule>);

REGISTER_KERNEL_BUILDER(Name("Tfdist>ApplyRowFtrl")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("table")
                            .HostMemory("accumulator")
                            .HostMemory("linear")
                            .HostMemory("rows")
                            .HostMemory("learning_rate")
                            .HostMemory("learning_rate_power")
                            .HostMemory("l1")
                            .HostMemory("l2")
                            .HostMemory("l2_shrinkage")
                            .HostMemory("beta")
                            .HostMemory("rounding_seeds"),
                        ApplyRowsGpuOp<FtrlRule>);

REGISTER_KERNEL_BUILDER(Name("Tfdist>ClipRows")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("table")
                            .HostMemory("rows")
                            .HostMemory("max_norm")
                            .HostMemory("rounding_seeds"),
                        ClipRowsGpuOp);

REGISTER_KERNEL_BUILDER(Name("Tfdist>ScaleTable")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("table")
                            .HostMemory("factor")
                            .HostMemory("rounding_seeds"),
                        ScaleTableGpuOp);

REGISTER_KERNEL_BUILDER(Name("Tfdist>SumDuplicateRows")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("rows")
                            .HostMemory("unique_rows"),
                        SumDuplicateRowsGpuOp);

}  // namespace
}  // namespace tfdist
