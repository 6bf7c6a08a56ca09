// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "custom_ops/codec/id_block.h"
#include "custom_ops/codec/id_messages.h"
#include "custom_ops/codec/placement_plan.h"
#include "custom_ops/common/parallel_tasks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>DecodeIds")
    .Input("payload: uint8")
    .Input("splits: int64")
    .Output("row_splits: int64")
    .Output("rows: int64")
    .Output("weights: float")
    .Output("served: int64")
    .Output("samples: float")
    .Attr("rank: int >= 0")
    .Attr("world_size: int >= 1")
    .Attr("features: list(string)")
    .Attr("vocabulary_sizes: list(int)")
    .Attr("dims: list(int)")
    .Attr("row_parts: list(int)")
    .Attr("column_parts: list(int)")
    .Attr("ranks: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      int64_t world_size;
      std::vector<std::string> features;
      TF_RETURN_IF_ERROR(c->GetAttr("world_size", &world_size));
      TF_RETURN_IF_ERROR(c->GetAttr("features", &features));
      for (int i = 0; i < 3; ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      c->set_output(3, c->Matrix(world_size, features.size()));
      c->set_output(4, c->Vector(world_size));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Decodes the messages of EncodeIds that this rank has received.

If a message contains an error record, the op fails with InvalidArgument and the
same text on all ranks. If a message is malformed, it fails with DataLoss. The
S samples are ordered by sender, then by feature.

payload: messages from all ranks, ordered by sender.
splits: [world_size], bytes of the message from each rank.
row_splits: [S + 1], offsets of the samples in `rows`.
rows: [n], rows of this rank's part of the feature's table.
weights: [n], or [0] if all weights are 1.
served: [world_size, features], number of samples of each rank and feature.
  Their sum is S.
samples: [world_size], input `samples` of EncodeIds on each rank.
features, vocabulary_sizes, dims, row_parts, column_parts, ranks: as for
  EncodeIds.
)doc");

constexpr int64_t kNanosecondsPerEntryRead = 4;

class DecodeIdsOp : public OpKernel {
 public:
  explicit DecodeIdsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, plan_.Read(ctx));
    OP_REQUIRES_OK(ctx, plan_.ReadRank(ctx, &rank_));
  }

  void Compute(OpKernelContext* ctx) override {
    IdMessages messages(plan_, rank_);
    OP_REQUIRES_OK(ctx, messages.Read(ctx));
    OP_REQUIRES_OK(ctx, messages.WriteRanks(ctx));
    OP_REQUIRES_OK(ctx, WriteEntries(ctx, messages));
  }

 private:
  // Runs one task per section. Each section writes to its own part of the
  // outputs.
  static absl::Status WriteEntries(OpKernelContext* ctx,
                                   const IdMessages& messages) {
    DecodedIds to;
    TF_RETURN_IF_ERROR(messages.AllocateEntries(ctx, &to));
    to.row_splits[0] = 0;
    const auto* data = static_cast<const uint8_t*>(ctx->input(0).data());
    const int64_t count = messages.parts().size();
    const int64_t entries = messages.entries();
    std::vector<IdError> errors(count, IdError::kNone);
    ParallelUnits(
        ctx->device()->tensorflow_cpu_worker_threads()->workers, count,
        kNanosecondsPerEntryRead * (entries / std::max<int64_t>(count, 1) + 1),
        [&](int64_t first, int64_t last) {
          for (int64_t i = first; i < last; ++i) {
            errors[i] = ReadPart(messages, messages.parts()[i], data, to);
          }
        });
    for (int64_t i = 0; i < count; ++i) {
      if (errors[i] == IdError::kNone) continue;
      return messages.Malformed(messages.parts()[i], errors[i]);
    }
    return absl::OkStatus();
  }

  static IdError ReadPart(const IdMessages& messages,
                          const IdMessages::Part& part, const uint8_t* data,
                          const DecodedIds& to) {
    const uint64_t row_limit = messages.RowLimit(part);
    for (size_t b = 0; b < part.reader.blocks().size(); ++b) {
      const IdError error =
          ReadBlock(part.reader.codes(), IdMessages::BlockOf(part, b),
                    row_limit, data, to);
      if (error != IdError::kNone) return error;
    }
    return IdError::kNone;
  }

  PlacementPlan plan_;
  int64_t rank_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>DecodeIds").Device(tensorflow::DEVICE_CPU),
                        DecodeIdsOp);

}  // namespace
}  // namespace tfdist
