// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_COLLECTIVE_OP_H_
#define TFDIST_CUSTOM_OPS_COMM_COLLECTIVE_OP_H_

#include <memory>
#include <string>

#include "custom_ops/comm/operation.h"
#include "custom_ops/comm/process_group.h"
#include "custom_ops/common/message.h"
#include "custom_ops/common/utf8.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// Attributes of every collective op, for REGISTER_OP. Such an op must also be
// stateful, because TensorFlow evaluates a stateless op with constant inputs
// only once. It must also be declared to communicate, because TensorFlow
// otherwise reports our UnavailableError as an internal error.
#define TFDIST_COLLECTIVE_ATTRS \
  Attr("group: int").Attr("tag: int >= 0").Attr("label: string = ''")

// Base class of collective kernels. A kernel checks its inputs, creates a call
// object that lives until `done`, and passes the call's Post and Run to the
// group.
class CollectiveOp : public tensorflow::AsyncOpKernel {
 public:
  explicit CollectiveOp(tensorflow::OpKernelConstruction* ctx)
      : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("group", &group_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tag", &tag_));
    OP_REQUIRES(ctx, tag_ >= 0 && tag_ < kPlanTag,
                tensorflow::errors::InvalidArgument(
                    "tag must be in [0, 2^62), received ", tag_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("label", &label_));
    // The name of the node is not used, because it may differ between ranks.
    if (label_.empty()) label_ = Message("tag ", tag_);
  }

 protected:
  // Messages of at most this many bytes are posted on TensorFlow's own thread,
  // because that takes less time than a switch to another thread.
  static constexpr size_t kPostInline = size_t{64} << 10;

  // Returns null, and sets the status of the context, if the group does not
  // exist.
  std::shared_ptr<Operation> NewOperation(tensorflow::OpKernelContext* ctx,
                                          Kind kind) const {
    std::shared_ptr<ProcessGroup> group = FindGroup(group_);
    if (group == nullptr) {
      ctx->SetStatus(absl::FailedPreconditionError(
          Message(KindName(kind), " '", label_, "': no open process group ",
                  "with handle ", group_)));
      return nullptr;
    }
    return std::make_shared<Operation>(std::move(group), kind, tag_, label_);
  }

  // Runs `call->Post()` and `call->Run()`. Ends early if TensorFlow cancels the
  // step because another op of the step has failed on this rank.
  template <typename Call>
  static void Start(tensorflow::OpKernelContext* ctx,
                    std::shared_ptr<Call> call, bool post_inline,
                    DoneCallback done) {
    const std::shared_ptr<Operation> operation = call->operation;
    tensorflow::CancellationManager* manager = ctx->cancellation_manager();
    tensorflow::CancellationToken token = 0;
    if (manager != nullptr) {
      token = manager->get_cancellation_token();
      const bool registered = manager->RegisterCallback(
          token, [operation] { operation->Cancel(); });
      if (!registered) operation->Cancel();
    }
    operation->group->Run(
        operation, post_inline, [call] { call->Post(); },
        [call] { call->Run(); },
        [ctx, manager, token,
         done = std::move(done)](const absl::Status& status) {
          if (manager != nullptr) manager->DeregisterCallback(token);
          // The message may contain text from peers, which need not be UTF-8.
          if (!status.ok()) {
            ctx->SetStatus({status.code(), AsUtf8(status.message())});
          }
          done();
        });
  }

  int64_t group_ = 0;
  int64_t tag_ = 0;
  std::string label_;
};

inline std::shared_ptr<ProcessGroup> GroupOf(tensorflow::OpKernelContext* ctx) {
  const tensorflow::Tensor& handle = ctx->input(0);
  std::shared_ptr<ProcessGroup> group;
  if (handle.NumElements() == 1) {
    group = FindGroup(handle.flat<int64_t>()(0));
  }
  if (group == nullptr) {
    ctx->SetStatus(absl::FailedPreconditionError(
        Message("no open process group with handle ", handle.DebugString())));
  }
  return group;
}

// Throws an error that fails the group if `status` is not OK, for example if an
// output cannot be allocated.
inline void CheckOk(const absl::Status& status) {
  if (!status.ok()) throw OperationError(status, true);
}

// Returns a hash of the dimensions of `shape` from index `first`.
inline uint64_t HashShape(const tensorflow::TensorShape& shape, int first,
                          uint64_t seed = 0) {
  uint64_t hash = seed * 31 + static_cast<uint64_t>(shape.dims());
  for (int i = first; i < shape.dims(); ++i) {
    hash =
        hash * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(shape.dim_size(i));
  }
  return hash;
}

// Sets the hash and the text of the shape of one row, such as "rows of [2,3]".
inline void SetRowShape(Header& header, const tensorflow::TensorShape& shape) {
  header.shape_hash = HashShape(shape, 1);
  tensorflow::TensorShape row;
  for (int i = 1; i < shape.dims(); ++i) row.AddDim(shape.dim_size(i));
  SetText(header.shapes, Message("rows of ", row.DebugString()).c_str());
}

inline uint64_t RowBytes(const tensorflow::Tensor& tensor) {
  uint64_t bytes = tensorflow::DataTypeSize(tensor.dtype());
  for (int i = 1; i < tensor.dims(); ++i) bytes *= tensor.dim_size(i);
  return bytes;
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_COLLECTIVE_OP_H_
