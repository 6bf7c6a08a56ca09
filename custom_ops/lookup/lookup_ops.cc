// SPDX-License-Identifier: Apache-2.0
#include <mutex>
#include <vector>

#include "custom_ops/codec/id_lists.h"
#include "custom_ops/lookup/lookup_functor.h"
#include "custom_ops/lookup/lookup_kernel.h"
#include "custom_ops/lookup/parallel_segments.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>Lookup")
    .Input("tables: N * resource")
    .Input("row_splits: int64")
    .Input("rows: int64")
    .Input("weights: float")
    .Input("served: int64")
    .Output("values: float")
    .Output("send_splits: int64")
    .Attr("N: int >= 0")
    .Attr("feature_tables: list(int)")
    .Attr("table_shapes: list(shape)")
    .Attr("shards: list(string)")
    // Stateful, because it reads variables that other ops write. TensorFlow
    // must not fold, merge or hoist it.
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      const auto served = c->input(c->num_inputs() - 1);
      const bool known = c->RankKnown(served);
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(known ? c->Dim(served, 0) : c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Computes the weighted sum of the rows of each sample, for all features.

Samples and results are ordered by the rank that requested them, then by
feature, as DecodeIds returns them. Block (w, f) of the values is the matrix
[served[w, f], d], where d is the number of columns of table feature_tables[f].

tables: variables [rows, d], float or bfloat16. They are not copied.
row_splits: [S + 1], offsets of the samples in `rows`.
rows: [n], rows of the table of the sample's feature. The op fails if a row is
  out of range. On a GPU such rows are skipped instead, because DecodeIds and
  MergeIds have checked them.
weights: [n], or [0] if all weights are 1.
served: [ranks, features], number of samples in each block. Their sum is S.
values: for each sample, the sum of weight * row over its rows; 0 if it has
  none.
send_splits: [ranks], number of values for each rank.
feature_tables: index of the table of each feature; -1 if this rank has no
  samples of the feature.
table_shapes: [rows, d] of each table, for the gradient.
shards: for each table, what it is a shard of, for the gradient; see
  lookup_ops.lookup.
)doc");

class LookupOp : public LookupKernel {
 public:
  using LookupKernel::LookupKernel;

 protected:
  absl::Status CheckIds(const LookupInputs& inputs,
                        int64_t samples) const override {
    return CheckIdList(0, inputs.rows, inputs.row_splits, inputs.weights,
                       samples);
  }

  // Returns an error if a row is not in its table.
  absl::Status Sum(OpKernelContext* ctx, const ReadTables& tables,
                   const LookupInputs& inputs, const LookupBlocks& found,
                   float* values) const override {
    const auto* row_splits =
        static_cast<const int64_t*>(inputs.row_splits.data());
    const auto* rows = static_cast<const int64_t*>(inputs.rows.data());
    std::vector<SegmentBlock> blocks;
    for (const LookupBlock& block : found.blocks) {
      const Tensor& table = tables[block.table];
      const bool is_float = table.dtype() == tensorflow::DT_FLOAT;
      const SegmentSum args = {
          is_float ? static_cast<const float*>(table.data()) : nullptr,
          block.width,
          row_splits + block.first_sample,
          rows,
          WeightsOrNull(inputs.weights),
          values + block.first_value};
      blocks.push_back(
          {args, block.samples,
           is_float ? nullptr : static_cast<const Bfloat16*>(table.data())});
    }
    std::mutex mutex;
    absl::Status status;
    ParallelSegmentSums(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                        blocks, [&](size_t i, int64_t first, int64_t end) {
                          const int64_t table = found.blocks[i].table;
                          const int64_t limit = tables[table].dim_size(0);
                          const absl::Status found_status =
                              CheckRows(table, limit, rows + first, rows + end);
                          if (found_status.ok()) return true;
                          std::lock_guard<std::mutex> lock(mutex);
                          status = found_status;
                          return false;
                        });
    return status;
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Lookup").Device(tensorflow::DEVICE_CPU),
                        LookupOp);

}  // namespace
}  // namespace tfdist
