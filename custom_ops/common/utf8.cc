// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/common/utf8.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace tfdist {

namespace {

// Returns the length in bytes of the character at the start of `text`, or 0 if
// there is none. Accepts the well-formed sequences of table 3-7 of the Unicode
// standard.
size_t CharacterLength(absl::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  const size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  if (text.size() < length) return 0;
  // Refuses overlong sequences, surrogates, and values after the last
  // character.
  const uint8_t least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const uint8_t most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (byte(1) < least || byte(1) > most) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xBF) return 0;
  }
  return length;
}

}  // namespace

std::string AsUtf8(absl::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t length = CharacterLength(text);
    const size_t taken = std::max<size_t>(length, 1);
    result.append(length == 0 ? "?" : text.substr(0, taken));
    text.remove_prefix(taken);
  }
  return result;
}

}  // namespace tfdist
