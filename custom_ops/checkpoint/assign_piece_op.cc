// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/comm/all_to_all_splits.h"
#include "custom_ops/comm/collective_op.h"
#include "custom_ops/comm/exchange.h"
#include "custom_ops/common/message.h"
#include "custom_ops/optimizer/shard_access.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("Tfdist>AssignPiece")
    .Input("variable: resource")
    .Input("own: T")
    .Input("others: T")
    .Input("splits: int64")
    .Input("rows: int64")
    .Input("error: string")
    .TFDIST_COLLECTIVE_ATTRS.Attr("T: {float, bfloat16}")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Assigns a piece of a table that all ranks have read. Each rank sends the others
their rows, which are received into the variable.

variable: this rank's shard, in host memory.
own: [n, columns], the rows of this rank.
others: [m], the values of the other ranks, in the order of the ranks.
splits: [ranks], number of elements of each rank in `others`.
rows: [ranks, 2], where the rows go that each rank has read: the first row of
  the variable, and how many rows may be assigned from there on.
error: why this rank could not read its part, or empty. If a rank has an error,
  the op fails on all ranks, and nothing is assigned.
)doc");

// Rows of the variable for what one rank has read.
struct Place {
  int64_t first, rows;
};

struct AssignPieceCall {
  OpKernelContext* ctx;
  std::shared_ptr<Operation> operation;
  std::unique_ptr<Exchange> exchange;
  std::vector<int64_t> splits;
  std::vector<Place> places;
  int64_t row_bytes = 0;  // of the variable

  // Returns what is wrong with the inputs, or "".
  std::string Read(const ShardAccess& shard) {
    const int ranks = operation->group->world_size();
    const Tensor& own = ctx->input(1);
    const Tensor& rows = ctx->input(4);
    const Tensor& values = shard.tensor(0);
    std::string error = CheckSplits(ctx->input(2), ctx->input(3), ranks);
    if (!error.empty()) return error;
    if (values.dtype() != own.dtype() || values.dims() < 1) {
      return "own must be of the variable's dtype, and the variable must have "
             "at least one dimension";
    }
    row_bytes = RowBytes(values);
    if (rows.dims() != 2 || rows.dim_size(0) != ranks ||
        rows.dim_size(1) != 2) {
      return Message("rows must be [", ranks, ", 2], received ",
                     rows.shape().DebugString());
    }
    const auto of_ranks = rows.matrix<int64_t>();
    const auto all = values.dim_size(0);
    for (int rank = 0; rank < ranks; ++rank) {
      const Place place = {of_ranks(rank, 0), of_ranks(rank, 1)};
      if (place.first < 0 || place.rows < 0 || place.first > all ||
          place.rows > all - place.first) {
        return Message("rows must be within the variable's ", all,
                       ", received ", place.rows, " from row ", place.first);
      }
      places.push_back(place);
    }
    error = CheckBytes(operation->group->rank(), own.TotalBytes());
    if (!error.empty()) return error;
    const auto flat = ctx->input(3).vec<int64_t>();
    splits.assign(flat.data(), flat.data() + flat.size());
    return "";
  }

  void Post() {
    exchange->ExpectAll();
    const int64_t size = tensorflow::DataTypeSize(ctx->input(2).dtype());
    std::vector<const char*> data(splits.size());
    const auto* next = static_cast<const char*>(ctx->input(2).data());
    for (size_t rank = 0; rank < splits.size(); ++rank) {
      data[rank] = next;
      next += splits[rank] * size;
    }
    for (int step = 1; step < operation->group->world_size(); ++step) {
      const int peer = operation->group->PeerAfter(step);
      exchange->SendRows(peer, data[peer], splits[peer]);
    }
  }

  // Other ops that use the variable wait meanwhile.
  void Run() {
    exchange->AwaitHeaders();
    ShardAccess shard;
    CheckOk(shard.Lock(ctx, 0));
    CheckOk(shard.PrepareToWrite(ctx));
    // If the op fails, rows may still arrive until the operation ends.
    operation->Keep(shard.tensor(0));
    const int ranks = operation->group->world_size();
    const int rank = operation->group->rank();
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == rank) continue;
      const std::string error = CheckBytes(peer, exchange->header(peer).bytes);
      if (!error.empty()) CheckOk(absl::InvalidArgumentError(error));
    }
    auto* table = static_cast<char*>(shard.tensor(0).data());
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == rank) continue;
      exchange->ReceiveInto(peer, table + places[peer].first * row_bytes);
    }
    const Tensor& own = ctx->input(1);  // copied while others arrive
    if (own.TotalBytes() > 0) {
      std::memcpy(table + places[rank].first * row_bytes, own.data(),
                  own.TotalBytes());
    }
    exchange->AwaitPayloads();
    exchange->AwaitSent();
  }

 private:
  std::string CheckBytes(int rank, int64_t bytes) const {
    if (bytes == 0) return "";
    const bool whole = row_bytes > 0 && bytes % row_bytes == 0;
    if (whole && bytes / row_bytes <= places[rank].rows) return "";
    return Message("rank ", rank, " has read ", bytes, " bytes for at most ",
                   places[rank].rows, " rows of ", row_bytes, " bytes");
  }
};

class AssignPieceOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<AssignPieceCall>();
    call->ctx = ctx;
    call->operation = NewOperation(ctx, Kind::kAllToAll);
    if (call->operation == nullptr) return done();
    const Tensor& others = ctx->input(2);
    Header header;
    header.dtype = others.dtype();
    SetRowShape(header, others.shape());
    header.agreed = RowBytes(others);
    call->exchange = std::make_unique<Exchange>(*call->operation, header);
    const std::string error = ErrorOf(ctx, call.get());
    if (!error.empty()) {
      call->exchange->SetError(error);
      call->splits.assign(call->operation->group->world_size(), 0);
    }
    call->operation->Keep(others);
    const bool small = others.TotalBytes() <= kPostInline;
    Start(ctx, std::move(call), small, std::move(done));
  }

 private:
  static std::string ErrorOf(OpKernelContext* ctx, AssignPieceCall* call) {
    const tensorflow::tstring& error =
        ctx->input(5).scalar<tensorflow::tstring>()();
    if (!error.empty()) return error;
    ShardAccess shard;
    const absl::Status status = shard.Lock(ctx, 0);
    if (!status.ok()) return std::string(status.message());
    return call->Read(shard);
  }
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>AssignPiece").Device(tensorflow::DEVICE_CPU), AssignPieceOp);

}  // namespace
}  // namespace tfdist
