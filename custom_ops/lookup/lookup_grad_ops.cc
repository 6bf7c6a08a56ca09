// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/lookup/entry_sorter.h"
#include "custom_ops/lookup/lookup_grad_functor.h"
#include "custom_ops/lookup/parallel_segments.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>LookupGrad")
    .Input("row_splits: int64")
    .Input("rows: int64")
    .Input("weights: float")
    .Input("served: int64")
    .Input("grad: float")
    .Output("unique_rows: N * int64")
    .Output("row_grads: N * float")
    .Attr("N: int >= 0")
    .Attr("feature_tables: list(int)")
    .Attr("table_shapes: list(shape)")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<tensorflow::PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(c->GetAttr("table_shapes", &shapes));
      const int tables = c->num_outputs() / 2;
      if (static_cast<int>(shapes.size()) != tables) {
        return InvalidArgument("table_shapes must have one element per table");
      }
      for (int i = 0; i < tables; ++i) {
        const auto rows = c->UnknownDim();
        c->set_output(i, c->Vector(rows));
        const bool known = shapes[i].dims() == 2 && shapes[i].dim_size(1) >= 0;
        c->set_output(tables + i,
                      c->Matrix(rows, known ? c->MakeDim(shapes[i].dim_size(1))
                                            : c->UnknownDim()));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Computes the gradient of Lookup with respect to the rows that it read.

The contributions to a row are added in the order of the samples, so that the
result does not depend on the number of threads.

row_splits, rows, weights, served: as for Lookup.
grad: gradient of the values of Lookup.
unique_rows: [u] for each table, unique rows, ascending.
row_grads: [u, d] for each table, gradients of these rows.
feature_tables, table_shapes: as for Lookup.
)doc");

class LookupGradOp : public OpKernel {
 public:
  explicit LookupGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, shapes_.Read(ctx));
    OP_REQUIRES_OK(
        ctx, ReadFeatureTables(ctx, shapes_.widths.size(), &feature_tables_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<TableEntries> tables;
    OP_REQUIRES_OK(ctx,
                   FindTableEntries(ctx, feature_tables_, shapes_, &tables));
    OP_REQUIRES_OK(ctx,
                   sorter_.Run(ctx, tables,
                               [&](size_t first, size_t end,
                                   const std::vector<SortedRange>& ranges) {
                                 return SumSorted(ctx, first, end, ranges);
                               }));
  }

 private:
  // The transposed lookup: sums the gradients of the samples for each row.
  absl::Status SumSorted(OpKernelContext* ctx, size_t first, size_t end,
                         const std::vector<SortedRange>& ranges) const {
    const auto* grad = static_cast<const float*>(ctx->input(4).data());
    std::vector<RowGradSum> sums;
    std::vector<Task> tasks;
    size_t i = 0;
    for (size_t t = first; t < end; ++t) {
      int64_t unique = 0;
      for (size_t j = i; j < ranges.size() && ranges[j].table == t; ++j) {
        unique += ranges[j].entries->unique();
      }
      int64_t* rows;
      float* row_grads;
      TF_RETURN_IF_ERROR(AllocateOutputs(ctx, t, unique, &rows, &row_grads));
      for (; i < ranges.size() && ranges[i].table == t; ++i) {
        const SortedEntries& range = *ranges[i].entries;
        sums.push_back({grad, shapes_.widths[t], range.row_splits(),
                        range.entries(), range.weights(), row_grads});
        rows = std::copy_n(range.rows(), range.unique(), rows);
        row_grads += range.unique() * shapes_.widths[t];
        tasks.push_back({range.unique() + range.row_splits()[range.unique()],
                         shapes_.widths[t] / 8 + 3});
      }
    }
    ParallelTasks(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                  tasks, [&](size_t task, int64_t low, int64_t high) {
                    const int64_t* splits = sums[task].row_splits;
                    const int64_t unique = ranges[task].entries->unique();
                    RowGradSumCpu(sums[task],
                                  SegmentAtWork(splits, unique, low),
                                  SegmentAtWork(splits, unique, high));
                  });
    return absl::OkStatus();
  }

  absl::Status AllocateOutputs(OpKernelContext* ctx, int t, int64_t unique,
                               int64_t** rows, float** row_grads) const {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, t, {unique}, &output));
    *rows = static_cast<int64_t*>(output->data());
    const int tables = static_cast<int>(shapes_.widths.size());
    TF_RETURN_IF_ERROR(
        AllocateOutput(ctx, tables + t, {unique, shapes_.widths[t]}, &output));
    *row_grads = static_cast<float*>(output->data());
    return absl::OkStatus();
  }

  std::vector<int64_t> feature_tables_;
  TableShapes shapes_;
  EntrySorter sorter_;
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>LookupGrad").Device(tensorflow::DEVICE_CPU), LookupGradOp);

}  // namespace
}  // namespace tfdist
