// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_BAD_ID_H_
#define TFDIST_CUSTOM_OPS_CODEC_BAD_ID_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace tfdist {

// The first invalid id under the policy `out_of_range="error"`.
struct BadId {
  // The sample of a feature of unique ids, whose ids belong to all samples.
  static constexpr int64_t kNoSample = -1;

  bool found = false;
  int64_t feature = 0;
  int64_t sample = 0;
  int64_t id = 0;
};

// Returns the error for `bad_id`. The text depends only on values that all
// ranks know, so that all ranks raise the same error.
absl::Status BadIdError(const std::string& layer, int64_t rank,
                        const BadId& bad_id, int64_t vocabulary_size);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_BAD_ID_H_
