// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/codec/id_lists.h"

#include "custom_ops/common/target_clones.h"

namespace tfdist {

using tensorflow::Tensor;
using tensorflow::errors::InvalidArgument;

namespace {

// Whether splits [count + 1] ascend.
TFDIST_CLONES
bool Ascend(const int64_t* splits, int64_t count) {
  int64_t descents = 0;
  for (int64_t i = 0; i < count; ++i) descents |= splits[i] > splits[i + 1];
  return descents == 0;
}

}  // namespace

absl::Status CheckIdListShapes(int index, const Tensor& ids,
                               const Tensor& row_splits, const Tensor& weights,
                               int64_t samples) {
  if (ids.dims() != 1 || row_splits.dims() != 1 || weights.dims() != 1) {
    return InvalidArgument("List ", index,
                           ": ids, row_splits and weights must be vectors. "
                           "Received shapes: ",
                           ids.shape().DebugString(), ", ",
                           row_splits.shape().DebugString(), ", ",
                           weights.shape().DebugString());
  }
  const int64_t count = ids.NumElements();
  if (row_splits.NumElements() == 0 ||
      row_splits.NumElements() - 1 != samples) {
    return InvalidArgument(
        "List ", index,
        ": row_splits must have one element more than the number of samples. "
        "All lists of a feature must have the same number of samples. "
        "Received: ",
        row_splits.NumElements(),
        " elements; the first list of the feature has ", samples, " samples");
  }
  if (weights.NumElements() != 0 && weights.NumElements() != count) {
    return InvalidArgument("List ", index,
                           ": weights must be empty or one per id. Received: ",
                           weights.NumElements(), " weights, ", count, " ids");
  }
  if (samples > kMaxIds || count > kMaxIds) {
    return InvalidArgument(
        "List ", index, ": at most ", kMaxIds,
        " samples and as many ids are supported. Received: ", samples,
        " samples, ", count, " ids. Use smaller batches");
  }
  return absl::OkStatus();
}

absl::Status CheckIdList(int index, const Tensor& ids, const Tensor& row_splits,
                         const Tensor& weights, int64_t samples) {
  TF_RETURN_IF_ERROR(
      CheckIdListShapes(index, ids, row_splits, weights, samples));
  const int64_t count = ids.NumElements();
  const auto splits = row_splits.vec<int64_t>();
  if (splits(0) != 0 || splits(samples) != count ||
      !Ascend(splits.data(), samples)) {
    return InvalidArgument(
        "List ", index, ": row_splits must ascend from 0 to the number of ids,",
        " ", count, ". Received: first ", splits(0), ", last ",
        splits(samples));
  }
  return absl::OkStatus();
}

}  // namespace tfdist
