// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/codec/bad_id.h"

#include "absl/strings/str_cat.h"

namespace tfdist {

absl::Status BadIdError(const std::string& layer, int64_t rank,
                        const BadId& bad_id, int64_t vocabulary_size) {
  const std::string sample = bad_id.sample == BadId::kNoSample
                                 ? std::string()
                                 : absl::StrCat(" in sample ", bad_id.sample);
  return absl::InvalidArgumentError(absl::StrCat(
      "Layer '", layer, "': id ", bad_id.id, sample, " of rank ", rank,
      " is out of range: ids must be at least 0 and below ", vocabulary_size,
      ". Enlarge the layer's input_dim (the table's vocabulary_size), correct "
      "the input, or drop such ids with out_of_range='ignore'."));
}

}  // namespace tfdist
