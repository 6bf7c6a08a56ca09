// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_KERNEL_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_KERNEL_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/codec/id_lists.h"
#include "custom_ops/common/allocate_output.h"
#include "custom_ops/lookup/lookup_blocks.h"
#include "custom_ops/lookup/read_tables.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// The entries that the samples of a call look up, in the memory of the device
// that holds the tables.
struct LookupInputs {
  const tensorflow::Tensor& row_splits;
  const tensorflow::Tensor& rows;
  const tensorflow::Tensor& weights;
};

// Lookup without the sums, which differ between CPU and GPU.
class LookupKernel : public tensorflow::OpKernel {
 public:
  explicit LookupKernel(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &count_));
    OP_REQUIRES_OK(ctx, ReadFeatureTables(ctx, count_, &feature_tables_));
  }

  void Compute(tensorflow::OpKernelContext* ctx) final {
    ReadTables tables;
    OP_REQUIRES_OK(ctx, tables.Lock(ctx, count_));
    const LookupInputs inputs = {ctx->input(count_), ctx->input(count_ + 1),
                                 ctx->input(count_ + 2)};
    const int64_t samples = inputs.row_splits.NumElements() - 1;
    OP_REQUIRES_OK(ctx, CheckIds(inputs, samples));
    LookupBlocks found;
    OP_REQUIRES_OK(
        ctx, FindLookupBlocks(samples, ctx->input(count_ + 3), feature_tables_,
                              tables.Widths(), &found));
    tensorflow::Tensor* values = nullptr;
    tensorflow::Tensor* send_splits = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {found.values}, &values));
    const int64_t ranks = found.send_splits.size();
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {ranks}, &send_splits));
    std::copy(found.send_splits.begin(), found.send_splits.end(),
              send_splits->vec<int64_t>().data());
    OP_REQUIRES_OK(ctx, Sum(ctx, tables, inputs, found,
                            static_cast<float*>(values->data())));
  }

 protected:
  virtual absl::Status CheckIds(const LookupInputs& inputs,
                                int64_t samples) const = 0;
  // Computes the sums into `values`.
  virtual absl::Status Sum(tensorflow::OpKernelContext* ctx,
                           const ReadTables& tables, const LookupInputs& inputs,
                           const LookupBlocks& found, float* values) const = 0;

 private:
  int count_ = 0;
  std::vector<int64_t> feature_tables_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_LOOKUP_KERNEL_H_
