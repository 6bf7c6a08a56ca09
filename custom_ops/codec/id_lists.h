// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_ID_LISTS_H_
#define TFDIST_CUSTOM_OPS_CODEC_ID_LISTS_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {

// The limit of ids and samples in one call, because their positions are 32-bit
// numbers.
constexpr int64_t kMaxIds = std::numeric_limits<int32_t>::max();

// One ragged list of ids. The ids of sample s are ids[row_splits[s] ..
// row_splits[s + 1]).
template <typename Tids>
struct IdList {
  const Tids* ids;
  const int64_t* row_splits;
  const float* weights;  // nullptr if all are 1
};

// The ids of a batch: several lists over the same samples, to be merged.
template <typename Tids>
struct IdLists {
  std::vector<IdList<Tids>> lists;
  int64_t samples = 0;
  int64_t ids = 0;  // of all lists
  bool weighted = false;

  // Returns the number of ids in samples [begin, end).
  int64_t CountIds(int64_t begin, int64_t end) const {
    int64_t count = 0;
    for (const auto& list : lists) {
      count += list.row_splits[end] - list.row_splits[begin];
    }
    return count;
  }
};

// Returns the weights of a list; nullptr if all are 1.
inline const float* WeightsOrNull(const tensorflow::Tensor& weights) {
  if (weights.NumElements() == 0) return nullptr;
  return static_cast<const float*>(weights.data());
}

// Checks the shapes of one list against the batch. The tensors may be in host
// or device memory.
absl::Status CheckIdListShapes(int index, const tensorflow::Tensor& ids,
                               const tensorflow::Tensor& row_splits,
                               const tensorflow::Tensor& weights,
                               int64_t samples);

// Checks the shapes and the offsets of one list in host memory.
absl::Status CheckIdList(int index, const tensorflow::Tensor& ids,
                         const tensorflow::Tensor& row_splits,
                         const tensorflow::Tensor& weights, int64_t samples);

// The inputs "ids", "row_splits" and "weights" of an op, which are lists of
// tensors.
struct IdInputs {
  explicit IdInputs(tensorflow::OpKernelContext* ctx) {
    status = ctx->input_list("ids", &ids);
    status.Update(ctx->input_list("row_splits", &row_splits));
    status.Update(ctx->input_list("weights", &weights));
  }

  absl::Status status;
  tensorflow::OpInputList ids;
  tensorflow::OpInputList row_splits;
  tensorflow::OpInputList weights;
};

// Reads the lists [first, end), which all belong to one feature. Requires at
// least one.
template <typename Tids>
absl::Status ReadIdLists(const IdInputs& inputs, int first, int end,
                         IdLists<Tids>* lists) {
  TF_RETURN_IF_ERROR(inputs.status);
  const auto& [status, ids, row_splits, weights] = inputs;
  lists->samples = row_splits[first].NumElements() - 1;
  for (int i = first; i < end; ++i) {
    TF_RETURN_IF_ERROR(
        CheckIdList(i, ids[i], row_splits[i], weights[i], lists->samples));
    const bool weighted = weights[i].NumElements() > 0;
    lists->lists.push_back(
        {static_cast<const Tids*>(ids[i].data()),
         static_cast<const int64_t*>(row_splits[i].data()),
         weighted ? static_cast<const float*>(weights[i].data()) : nullptr});
    lists->ids += ids[i].NumElements();
    lists->weighted |= weighted;
  }
  if (lists->ids > kMaxIds) {
    return tensorflow::errors::InvalidArgument(
        "The lists of a feature must have at most ", kMaxIds,
        " ids in total. Received: ", lists->ids, ". Use smaller batches");
  }
  return absl::OkStatus();
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_ID_LISTS_H_
