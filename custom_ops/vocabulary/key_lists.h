// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_VOCABULARY_KEY_LISTS_H_
#define TFDIST_CUSTOM_OPS_VOCABULARY_KEY_LISTS_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "custom_ops/vocabulary/key_messages.h"
#include "custom_ops/vocabulary/unique_keys.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// The input "keys" of a kernel: lists of keys. Each list belongs to one
// vocabulary.
class KeyLists {
 public:
  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* ctx) {
    int64_t tables, lists;
    TF_RETURN_IF_ERROR(ctx->GetAttr("T", &tables));
    TF_RETURN_IF_ERROR(ctx->GetAttr("L", &lists));
    TF_RETURN_IF_ERROR(ctx->GetAttr("list_vocabularies", &of_list_));
    int64_t last = -1;
    bool good = static_cast<int64_t>(of_list_.size()) == lists;
    for (const int64_t table : of_list_) {
      good = good && (table == last || table == last + 1);
      last = table;
    }
    if (good && last == tables - 1) return absl::OkStatus();
    return tensorflow::errors::InvalidArgument(
        "list_vocabularies must have one element for each of the ", lists,
        " lists, and must ascend from 0 to ", tables - 1,
        " without gaps. Received ", of_list_.size(), " elements");
  }

  // Reads the lists, grouped by vocabulary, and sets `count` to their total
  // number of keys.
  absl::Status Read(tensorflow::OpKernelContext* ctx,
                    const Vocabularies& vocabularies,
                    std::vector<std::vector<KeyList>>* lists,
                    int64_t* count) const {
    tensorflow::OpInputList keys;
    TF_RETURN_IF_ERROR(ctx->input_list("keys", &keys));
    lists->resize(vocabularies.size());
    *count = 0;
    for (int i = 0; i < keys.size(); ++i) {
      const int words = vocabularies[of_list_[i]].words();
      const auto& shape = keys[i].shape();
      const bool good = words == 1
                            ? shape.dims() == 1
                            : shape.dims() == 2 && shape.dim_size(1) == 2;
      if (!good) {
        return tensorflow::errors::InvalidArgument(
            "Table '", vocabularies[of_list_[i]].options().name,
            "': keys must be ", words == 1 ? "[n]" : "[n, 2]",
            ". Received shape: ", shape.DebugString());
      }
      (*lists)[of_list_[i]].push_back({keys[i].data(), shape.dim_size(0)});
      *count += shape.dim_size(0);
    }
    if (*count <= std::numeric_limits<int32_t>::max()) return absl::OkStatus();
    return tensorflow::errors::InvalidArgument(
        "At most 2^31 - 1 keys are supported in one call. Received: ", *count,
        ". Use smaller batches");
  }

 private:
  std::vector<int64_t> of_list_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_VOCABULARY_KEY_LISTS_H_
