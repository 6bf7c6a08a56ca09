// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "custom_ops/optimizer/reset_rows_kernel.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/bfloat16.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelContext;

REGISTER_OP("Tfdist>ResetRows")
    .Input("variable: resource")
    .Input("ids: int64")
    .Input("seed: int64")
    .Attr("rows: int >= 1")
    .Attr("row_part: int >= 0")
    .Attr("row_parts: int >= 1")
    .Attr("local_rows: int >= 0")
    .Attr("first_column: int >= 0")
    .Attr("local_dim: int >= 0")
    .Attr(
        "distribution: "
        "{'constant', 'uniform', 'normal', 'truncated_normal'}")
    .Attr("a: float")
    .Attr("b: float")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Resets rows of a table or a slot to their initial values, in place.

variable: cell of this rank, float32 or bfloat16.
ids: rows of the unpartitioned table. Rows of other ranks are ignored.
seed: scalar, as for InitRows, like the attributes.
)doc");

struct ResetOnCpu {
  static absl::Status Reset(OpKernelContext* ctx, const InitialRows& initial,
                            uint64_t seed, const std::vector<ResetRow>& rows,
                            ShardAccess* shard) {
    std::vector<int64_t> written;
    for (const ResetRow& row : rows) written.push_back(row.local);
    TF_RETURN_IF_ERROR(shard->PrepareToWriteRows(ctx));
    shard->WillWrite(written.data(), static_cast<int64_t>(written.size()));
    const RowBuffers buffers = shard->Buffers(0, {});
    std::vector<float> values(initial.block().local_dim);
    for (const ResetRow& row : rows) {
      initial.Fill(seed, row.id, values.data());
      const int64_t at = row.local * initial.block().local_dim;
      if (buffers.table) {
        std::copy(values.begin(), values.end(), buffers.table + at);
      } else {
        auto* to =
            reinterpret_cast<tensorflow::bfloat16*>(buffers.bfloat16_table);
        std::transform(values.begin(), values.end(), to + at, [](float value) {
          return static_cast<tensorflow::bfloat16>(value);
        });
      }
    }
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>ResetRows").Device(tensorflow::DEVICE_CPU),
                        ResetRowsKernel<ResetOnCpu>);

}  // namespace
}  // namespace tfdist
