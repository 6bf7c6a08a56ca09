// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_MESSAGE_H_
#define TFDIST_CUSTOM_OPS_COMMON_MESSAGE_H_

#include <sstream>
#include <string>

namespace tfdist {

// Returns the arguments as one text, for error messages.
template <typename... Args>
std::string Message(const Args&... args) {
  std::ostringstream stream;
  (stream << ... << args);
  return stream.str();
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_MESSAGE_H_
