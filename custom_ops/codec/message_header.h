// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_MESSAGE_HEADER_H_
#define TFDIST_CUSTOM_OPS_CODEC_MESSAGE_HEADER_H_

#include <cstddef>
#include <cstdint>

#include "custom_ops/codec/bad_id.h"
#include "custom_ops/codec/header_bytes.h"

namespace tfdist {

// A message contains the ids of all features that one rank sends to another:
//
//   header     version and flags, rank, samples
//   sections   for each feature of which the receiver holds a cell, in order:
//              the number of bytes as a varint, then the section
//              (id_section.h); a section without entries is a single 0
//
// A sender with a bad id sends an error record in the header and no sections,
// to all ranks. The step then fails on all ranks with the same text.

struct MessageHeader {
  static constexpr size_t kMaxBytes = 64;

  int64_t rank = 0;
  float samples = 0;  // the sender's weight in the mean over the batch
  BadId bad_id;

  // Returns the end of the written bytes.
  uint8_t* Write(uint8_t* out) const {
    *out++ = kVersion | (bad_id.found ? kBadId : 0);
    out = PutVarint(rank, out);
    out = PutFixed(samples, out);
    if (!bad_id.found) return out;
    out = PutVarint(bad_id.feature, out);
    out = PutFixed(bad_id.sample, out);
    return PutFixed(bad_id.id, out);
  }

  // Returns nullptr, or why the message is malformed.
  const char* Read(HeaderReader* in) {
    const uint8_t flags = in->Byte();
    if ((flags & ~kBadId) != kVersion) return "its version is unknown";
    rank = static_cast<int64_t>(in->Varint());
    samples = in->Fixed<float>();
    if (flags & kBadId) {
      bad_id.found = true;
      bad_id.feature = static_cast<int64_t>(in->Varint());
      bad_id.sample = in->Fixed<int64_t>();
      bad_id.id = in->Fixed<int64_t>();
    }
    return in->ok() ? nullptr : "its header is malformed";
  }

 private:
  static constexpr uint8_t kVersion = 2;
  static constexpr uint8_t kBadId = 0x40;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_MESSAGE_HEADER_H_
