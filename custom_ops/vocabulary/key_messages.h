// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_KEY_MESSAGES_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_KEY_MESSAGES_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "custom_ops/common/allocate_output.h"
#include "custom_ops/vocabulary/vocabulary.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/errors.h"

// Messages about keys, for one table after another. A question contains for
// each table:
//
//   number of keys that occurred once; number of other keys; the keys, in this
//   order; the count of each of the other keys
//
// Its answer starts with a byte that is 1 if an error follows, as code and
// text. Otherwise it contains for each table:
//
//   a row for each key of the question; number of rows that have lost their
//   keys, whichever rank asked; these rows
//
// Numbers are varints, keys have their format in memory, and rows have 32 bits.

namespace tfdist {

// The vocabularies in the input "vocabularies" of a kernel.
class Vocabularies {
 public:
  absl::Status Read(tensorflow::OpKernelContext* ctx) {
    tensorflow::OpInputList handles;
    TF_RETURN_IF_ERROR(ctx->input_list("vocabularies", &handles));
    for (int i = 0; i < handles.size(); ++i) {
      tensorflow::core::RefCountPtr<Vocabulary> vocabulary;
      TF_RETURN_IF_ERROR(tensorflow::LookupResource(
          ctx, handles[i].scalar<tensorflow::ResourceHandle>()(), &vocabulary));
      all_.push_back(std::move(vocabulary));
    }
    return absl::OkStatus();
  }

  int64_t size() const { return all_.size(); }
  Vocabulary& operator[](int64_t i) const { return *all_[i]; }
  int64_t world_size() const { return all_[0]->options().world_size; }

 private:
  std::vector<tensorflow::core::RefCountPtr<Vocabulary>> all_;
};

// Checks that `splits` divide `payload` into one message per rank.
inline absl::Status CheckMessages(const tensorflow::Tensor& payload,
                                  const tensorflow::Tensor& splits,
                                  int64_t world_size) {
  int64_t left = payload.NumElements();
  bool good = payload.dims() == 1 && splits.dims() == 1 &&
              splits.NumElements() == world_size;
  for (int64_t rank = 0; good && rank < world_size; ++rank) {
    const int64_t size = splits.vec<int64_t>()(rank);
    good = size >= 0 && size <= left;
    left -= size;
  }
  if (good && left == 0) return absl::OkStatus();
  return tensorflow::errors::InvalidArgument(
      "splits must have the size of the message of each of the ", world_size,
      " ranks, and sum to the size of payload. Received shapes: ",
      payload.shape().DebugString(), ", ", splits.shape().DebugString());
}

inline absl::Status MalformedKeys(int64_t source) {
  return tensorflow::errors::DataLoss(
      "The message about keys from rank ", source,
      " is malformed. Use the same version of tfdist_ext "
      "on all ranks");
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_KEY_MESSAGES_H_
