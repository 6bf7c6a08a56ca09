// SPDX-License-Identifier: Apache-2.0
// The pooled lookup of a table that lies on a GPU. Compiled with the CUDA
// sources only; has not run on a GPU yet.
#if TFDIST_CUDA
#define EIGEN_USE_GPU

#include "lookup_functor_gpu.h"
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

class LookupGpuOp : public OpKernel {
 public:
  explicit LookupGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(ctx,
                   tensorflow::LookupResource(
                       ctx, tensorflow::HandleFromInput(ctx, 0), &variable));
    tensorflow::tf_shared_lock lock(*variable->mu());
    const Tensor& table = *variable->tensor();
    const Tensor& row_splits = ctx->input(1);
    const Tensor& rows = ctx->input(2);
    const Tensor& weights = ctx->input(3);
    OP_REQUIRES(ctx, table.dtype() == tensorflow::DT_FLOAT && table.dims() == 2,
                InvalidArgument("The table must be a float matrix."));
    OP_REQUIRES(ctx,
                row_splits.dims() == 1 && row_splits.NumElements() > 0 &&
                    (weights.NumElements() == 0 ||
                     weights.NumElements() == rows.NumElements()),
                InvalidArgument("row_splits must be a vector of samples + 1 "
                                "offsets, weights empty or one per row."));
    const int64_t samples = row_splits.NumElements() - 1;
    Tensor* output = nullptr;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({samples, table.dim_size(1)}),
                                  &output));
    const SegmentSum args = {static_cast<const float*>(table.data()),
                             table.dim_size(1),
                             static_cast<const int64_t*>(row_splits.data()),
                             static_cast<const int64_t*>(rows.data()),
                             weights.NumElements() == 0
                                 ? nullptr
                                 : static_cast<const float*>(weights.data()),
                             static_cast<float*>(output->data())};
    const int error =
        TfdistSegmentSumGpu(&args, table.dim_size(0), samples,
                            ctx->eigen_device<Eigen::GpuDevice>().stream());
    OP_REQUIRES(
        ctx, error == 0,
        Internal("The lookup kernel failed to start: CUDA error ", error));
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Lookup")
                            .Device(tensorflow::DEVICE_GPU)
                            .TypeConstraint<float>("T"),
                        LookupGpuOp);

}  // namespace
}  // namespace tfdist

#endif  // TFDIST_CUDA
