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

REGISTER_OP("Tfdist>KeepTexts")
    .Input("vocabulary: resource")
    .Input("rows: int32")
    .Input("texts: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Keeps the texts of keys on this rank, until their rows are other keys'.

rows: [n], of the whole table; nothing is kept of those below 1, nor of those
  of which a text is kept, or was shortened.
texts: [n].
)doc");

class KeepTextsOp : public OpKernel {
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
            "': rows and texts must be [n]. Received shapes: ",
            rows.shape().DebugString(), ", ", texts.shape().DebugString()));
    vocabulary->texts().Keep(rows.vec<int32_t>().data(),
                             texts.vec<tstring>().data(), rows.NumElements());
  }
};

REGISTER_OP("Tfdist>ShortenTexts")
    .Input("vocabulary: resource")
    .Input("rows: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Remembers that the texts of rows [n] are kept on other ranks.
)doc");

class ShortenTextsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    RefCountPtr<Vocabulary> vocabulary;
    OP_REQUIRES_OK(ctx, VocabularyOf(ctx, &vocabulary));
    const auto rows = ctx->input(1).flat<int32_t>();
    vocabulary->texts().Shorten(rows.data(), rows.size());
  }
};

REGISTER_OP("Tfdist>KeptTexts")
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
The texts that are kept on this rank, with their rows in order, [n].
)doc");

class KeptTextsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    RefCountPtr<Vocabulary> vocabulary;
    OP_REQUIRES_OK(ctx, VocabularyOf(ctx, &vocabulary));
    const std::vector<KeptTexts::Pair> all = vocabulary->texts().All();
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

REGISTER_KERNEL_BUILDER(Name("Tfdist>KeepTexts").Device(tensorflow::DEVICE_CPU),
                        KeepTextsOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>ShortenTexts").Device(tensorflow::DEVICE_CPU), ShortenTextsOp);
REGISTER_KERNEL_BUILDER(Name("Tfdist>KeptTexts").Device(tensorflow::DEVICE_CPU),
                        KeptTextsOp);

}  // namespace
}  // namespace tfdist
