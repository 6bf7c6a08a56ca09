// SPDX-License-Identifier: Apache-2.0
// The pooled lookup of tables that lie on a GPU, one launch for a feature and a
// rank it is served to. Compiled with the CUDA sources only; has not run on a
// GPU yet.
#if TFDIST_CUDA
#define EIGEN_USE_GPU

#include <algorithm>
#include <vector>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/embedding/id_lists.h"
#include "custom_ops/embedding/lookup_blocks.h"
#include "custom_ops/embedding/lookup_functor_gpu.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/platform/errors.h"
#include "unsupported/Eigen/CXX11/Tensor"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::Internal;
using tensorflow::errors::InvalidArgument;

using Variable = tensorflow::core::RefCountPtr<tensorflow::Var>;

class LookupGpuOp : public OpKernel {
 public:
  explicit LookupGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &count_));
    OP_REQUIRES_OK(ctx, ReadFeatureTables(ctx, count_, &feature_tables_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<Variable> variables(count_);
    std::vector<int64_t> widths;
    for (int i = 0; i < count_; ++i) {
      OP_REQUIRES_OK(
          ctx, tensorflow::LookupResource(
                   ctx, tensorflow::HandleFromInput(ctx, i), &variables[i]));
      const Tensor& table = *variables[i]->tensor();
      OP_REQUIRES(ctx,
                  table.dtype() == tensorflow::DT_FLOAT && table.dims() == 2,
                  InvalidArgument("The table must be a float matrix."));
      widths.push_back(table.dim_size(1));
    }
    const Tensor& row_splits = ctx->input(count_);
    const Tensor& rows = ctx->input(count_ + 1);
    const Tensor& weights = ctx->input(count_ + 2);
    OP_REQUIRES(ctx,
                row_splits.dims() == 1 && row_splits.NumElements() > 0 &&
                    (weights.NumElements() == 0 ||
                     weights.NumElements() == rows.NumElements()),
                InvalidArgument("row_splits must be a vector of samples + 1 "
                                "offsets, weights empty or one per row."));
    LookupBlocks found;
    OP_REQUIRES_OK(ctx, FindLookupBlocks(row_splits.NumElements() - 1,
                                         ctx->input(count_ + 3),
                                         feature_tables_, widths, &found));
    Tensor* values = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {found.values}, &values));
    Tensor* send_splits = nullptr;
    const int64_t ranks = found.send_splits.size();
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {ranks}, &send_splits));
    std::copy(found.send_splits.begin(), found.send_splits.end(),
              send_splits->vec<int64_t>().data());
    for (const LookupBlock& block : found.blocks) {
      OP_REQUIRES_OK(ctx, Launch(ctx, block, *variables[block.table], values));
    }
  }

 private:
  absl::Status Launch(OpKernelContext* ctx, const LookupBlock& block,
                      tensorflow::Var& variable, Tensor* values) const {
    const Tensor& weights = ctx->input(count_ + 2);
    tensorflow::tf_shared_lock lock(*variable.mu());
    const Tensor& table = *variable.tensor();
    const SegmentSum args = {
        static_cast<const float*>(table.data()),
        block.width,
        static_cast<const int64_t*>(ctx->input(count_).data()) +
            block.first_sample,
        static_cast<const int64_t*>(ctx->input(count_ + 1).data()),
        WeightsOrNull(weights),
        static_cast<float*>(values->data()) + block.first_value};
    const int error =
        TfdistSegmentSumGpu(&args, table.dim_size(0), block.samples,
                            ctx->eigen_device<Eigen::GpuDevice>().stream());
    if (error != 0) {
      return Internal("The lookup kernel failed to start: CUDA error ", error);
    }
    return absl::OkStatus();
  }

  int count_ = 0;
  std::vector<int64_t> feature_tables_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Lookup")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("served")
                            .HostMemory("send_splits"),
                        LookupGpuOp);

}  // namespace
}  // namespace tfdist

#endif  // TFDIST_CUDA
