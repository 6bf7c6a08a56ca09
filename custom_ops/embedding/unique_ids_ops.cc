// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <memory>

#include "custom_ops/embedding/radix_sort.h"
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
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Tfdist>UniqueIds")
    .Input("ids: int64")
    .Output("unique: int64")
    .Output("positions: int64")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle ids;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &ids));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, ids);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Finds the distinct ids of a batch.

ids: [n].
unique: [u], the distinct ids ascending.
positions: [n]; ids[i] is unique[positions[i]].
)doc");

class UniqueIdsOp : public OpKernel {
 public:
  explicit UniqueIdsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& ids = ctx->input(0);
    const int64_t count = ids.NumElements();
    OP_REQUIRES(ctx,
                ids.dims() == 1 && count <= std::numeric_limits<int32_t>::max(),
                InvalidArgument("ids must be a vector of less than 2^31 "
                                "elements. Received shape: ",
                                ids.shape().DebugString()));
    Tensor* positions = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, ids.shape(), &positions));
    Memory memory(2 * count);
    SortBuffers sorted = Sort(ids.vec<int64_t>().data(), count, &memory);
    auto* positions_out = positions->vec<int64_t>().data();
    int64_t last = -1;
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t key = sorted.keys[i];
      last += i == 0 || key != sorted.keys[last];
      sorted.keys[last] = key;
      positions_out[sorted.values[i]] = last;
    }
    Tensor* unique = nullptr;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(0, TensorShape({last + 1}), &unique));
    auto* unique_out = unique->vec<int64_t>().data();
    for (int64_t i = 0; i <= last; ++i) {
      unique_out[i] = static_cast<int64_t>(sorted.keys[i] + memory.smallest);
    }
  }

 private:
  struct Memory {
    explicit Memory(size_t size)
        : keys(new uint64_t[size]), values(new uint32_t[size]) {}
    std::unique_ptr<uint64_t[]> keys;
    std::unique_ptr<uint32_t[]> values;
    uint64_t smallest = 0;
  };

  // Sorts the ids' distances from the smallest, with their positions.
  static SortBuffers Sort(const int64_t* ids, int64_t count, Memory* memory) {
    SortBuffers sort{memory->keys.get(), memory->keys.get() + count,
                     memory->values.get(), memory->values.get() + count};
    if (count == 0) return sort;
    const auto range = std::minmax_element(ids, ids + count);
    memory->smallest = static_cast<uint64_t>(*range.first);
    for (int64_t i = 0; i < count; ++i) {
      sort.keys[i] = static_cast<uint64_t>(ids[i]) - memory->smallest;
      sort.values[i] = static_cast<uint32_t>(i);
    }
    const uint64_t largest =
        static_cast<uint64_t>(*range.second) - memory->smallest;
    RadixSort(count, 0, BitWidth(largest), &sort);
    return sort;
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>UniqueIds").Device(tensorflow::DEVICE_CPU),
                        UniqueIdsOp);

}  // namespace
}  // namespace tfdist
