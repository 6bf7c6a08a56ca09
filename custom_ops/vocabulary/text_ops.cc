// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <vector>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/vocabulary/vocabulary.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;
using tensorflow::core::RefCountPtr;
using tensorflow::shape_inference::InferenceContext;

absl::Status VocabularyOf(OpKernelContext* ctx,
                          RefCountPtr<Vocabulary>* vocabulary) {
  return tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0),
                                    vocabulary);
}

REGISTER_OP("Tfdist>StoreTexts")
    .Input("vocabulary: resource")
    .Input("rows: int32")
    .Input("texts: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Stores the texts of keys on this rank, until their rows get other keys.

vocabulary: the vocabulary of the keys.
rows: [n], rows of the keys in the unpartitioned table. Rows below 1 are
  ignored, and so are rows whose text is already stored or was released.
texts: [n], texts of the keys.
)doc");

class StoreTextsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    RefCountPtr<Vocabulary> vocabulary;
    OP_REQUIRES_OK(ctx, VocabularyOf(ctx, &vocabulary));
    const Tensor& rows = ctx->input(1);
    const Tensor& texts = ctx->input(2);
    OP_REQUIRES(
        ctx, rows.dims() == 1 && rows.shape() == texts.shape(),
        tensorflow::errors::InvalidArgument(
            "Table '", vocabulary->options().name,
            "': rows and texts must have the same shape [n]. "
            "Received shapes: ",
            rows.shape().DebugString(), ", ", texts.shape().DebugString()));
    vocabulary->texts().Store(rows.vec<int32_t>().data(),
                              texts.vec<tstring>().data(), rows.NumElements());
  }
};

REGISTER_OP("Tfdist>ReleaseTexts")
    .Input("vocabulary: resource")
    .Input("rows: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Deletes texts from this rank, and records that other ranks store them.

vocabulary: the vocabulary of the keys.
rows: [n], rows of the keys in the unpartitioned table.
)doc");

class ReleaseTextsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    RefCountPtr<Vocabulary> vocabulary;
    OP_REQUIRES_OK(ctx, VocabularyOf(ctx, &vocabulary));
    const auto rows = ctx->input(1).flat<int32_t>();
    vocabulary->texts().Release(rows.data(), rows.size());
  }
};

REGISTER_OP("Tfdist>StoredTexts")
    .Input("vocabulary: resource")
    .Output("rows: int32")
    .Output("texts: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 2; ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns the texts that this rank stores.

vocabulary: the vocabulary of the keys.
rows: [n], rows of the keys in the unpartitioned table, ascending.
texts: [n], texts of the keys in these rows.
)doc");

class StoredTextsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    RefCountPtr<Vocabulary> vocabulary;
    OP_REQUIRES_OK(ctx, VocabularyOf(ctx, &vocabulary));
    const std::vector<TextStore::Pair> all = vocabulary->texts().All();
    const int64_t size = all.size();
    Tensor *rows = nullptr, *texts = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {size}, &rows));
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {size}, &texts));
    for (int64_t i = 0; i < size; ++i) {
      rows->vec<int32_t>()(i) = all[i].first;
      texts->vec<tstring>()(i) = all[i].second;
    }
  }
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>StoreTexts").Device(tensorflow::DEVICE_CPU), StoreTextsOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>ReleaseTexts").Device(tensorflow::DEVICE_CPU), ReleaseTextsOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>StoredTexts").Device(tensorflow::DEVICE_CPU), StoredTextsOp);

}  // namespace
}  // namespace tfdist
