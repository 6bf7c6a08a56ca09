// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_UTF8_H_
#define TFDIST_CUSTOM_OPS_COMMON_UTF8_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tfdist {

// Returns `text` with a '?' in place of each byte that is not part of a UTF-8
// character. Python refuses an error whose text is not UTF-8. A text from a
// peer may contain any bytes, and may be truncated within a character.
std::string AsUtf8(absl::string_view text);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_UTF8_H_
