// SPDX-License-Identifier: Apache-2.0
//
// Snapshots of variables, which are written to a checkpoint during training.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "custom_ops/optimizer/row_snapshot.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/mutex.h"

namespace tfdist {
namespace {

namespace tf = ::tensorflow;

REGISTER_OP("Tfdist>StartRowSnapshot")
    .Input("variable: resource")
    .Output("snapshot: resource")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::ScalarShape)
    .Doc(R"doc(
Starts a snapshot of a variable: its rows as they are now, see row_snapshot.h.

variable: variable in host memory, with at least one dimension.
snapshot: reference-counted handle. The snapshot ends with its last reference.
)doc");

REGISTER_OP("Tfdist>TakeSnapshotRows")
    .Input("snapshot: resource")
    .Input("rows: int64")
    .Output("values: dtype")
    .Attr("dtype: type")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::UnknownShape)
    .Doc(R"doc(
Copies rows of a snapshot. Each row can be taken once.

rows: [n].
values: [n, ...], as they were when the snapshot was started.
)doc");

// The snapshot that a handle refers to. It ends with the handle.
class SnapshotResource : public tf::ResourceBase {
 public:
  explicit SnapshotResource(SharedSnapshot snapshot)
      : snapshot_(std::move(snapshot)) {}
  ~SnapshotResource() override { EndSnapshot(snapshot_); }

  std::string DebugString() const override { return "row snapshot"; }
  RowSnapshot& snapshot() { return *snapshot_; }

 private:
  SharedSnapshot snapshot_;
};

class StartRowSnapshotOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tf::OpKernelContext* ctx) override {
    const tf::ResourceHandle& handle = tf::HandleFromInput(ctx, 0);
    tf::core::RefCountPtr<tf::Var> variable;
    OP_REQUIRES_OK(ctx, tf::LookupResource(ctx, handle, &variable));
    SharedSnapshot snapshot;
    OP_REQUIRES_OK(
        ctx, StartSnapshot(std::move(variable), handle.name(), &snapshot));
    tf::Tensor result(tf::DT_RESOURCE, {});
    result.scalar<tf::ResourceHandle>()() =
        tf::ResourceHandle::MakeRefCountingHandle<SnapshotResource>(
            new SnapshotResource(std::move(snapshot)), ctx->device()->name());
    ctx->set_output(0, result);
  }
};

class TakeSnapshotRowsOp : public tf::OpKernel {
 public:
  explicit TakeSnapshotRowsOp(tf::OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &dtype_));
  }

  void Compute(tf::OpKernelContext* ctx) override {
    tf::core::RefCountPtr<SnapshotResource> resource;
    OP_REQUIRES_OK(
        ctx, tf::LookupResource(ctx, tf::HandleFromInput(ctx, 0), &resource));
    const tf::Tensor& rows = ctx->input(1);
    RowSnapshot& snapshot = resource->snapshot();
    OP_REQUIRES(ctx, rows.dims() == 1,
                absl::InvalidArgumentError("rows must be [n]"));
    OP_REQUIRES(ctx, snapshot.dtype() == dtype_,
                absl::InvalidArgumentError("dtype must be the variable's"));
    tf::TensorShape shape = snapshot.shape();
    shape.set_dim(0, rows.NumElements());
    tf::Tensor* values = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &values));
    // A few rows at a time, so that updates and lookups need not wait long.
    constexpr int64_t kMostBytes = 1 << 20;
    const int64_t size = rows.NumElements();
    const int64_t row_bytes = size == 0 ? 1 : values->TotalBytes() / size;
    const int64_t step = std::max<int64_t>(1, kMostBytes / (row_bytes + 1));
    const auto* from = static_cast<const int64_t*>(rows.data());
    auto* to = static_cast<char*>(values->data());
    for (int64_t first = 0; first < size; first += step) {
      const tf::mutex_lock lock(*snapshot.variable()->mu());
      OP_REQUIRES_OK(ctx,
                     snapshot.Take(from + first, std::min(step, size - first),
                                   to + first * row_bytes));
    }
  }

 private:
  tf::DataType dtype_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>StartRowSnapshot").Device(tf::DEVICE_CPU),
                        StartRowSnapshotOp);
REGISTER_KERNEL_BUILDER(Name("Tfdist>TakeSnapshotRows").Device(tf::DEVICE_CPU),
                        TakeSnapshotRowsOp);

}  // namespace
}  // namespace tfdist
