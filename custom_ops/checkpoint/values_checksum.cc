// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/checkpoint/values_checksum.h"

#include <cstring>

#include "absl/crc/crc32c.h"
#include "custom_ops/common/target_clones.h"
#include "tensorflow/core/lib/hash/crc32c.h"
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace tfdist {
namespace {

#if defined(__x86_64__)
TFDIST_INLINE uint64_t Word(const char* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// The instruction takes three cycles, and can begin in each. So the checksums
// of three parts are computed side by side.
__attribute__((target("sse4.2"))) uint32_t ByInstruction(uint32_t crc,
                                                         const char* data,
                                                         size_t size) {
  const size_t part = size / (3 * sizeof(uint64_t)) * sizeof(uint64_t);
  uint64_t a = static_cast<uint32_t>(~crc), b = 0xffffffff, c = 0xffffffff;
  for (size_t i = 0; i < part; i += sizeof(uint64_t)) {
    a = _mm_crc32_u64(a, Word(data + i));
    b = _mm_crc32_u64(b, Word(data + part + i));
    c = _mm_crc32_u64(c, Word(data + 2 * part + i));
  }
  const auto of = [](uint64_t state) {
    return absl::crc32c_t(~static_cast<uint32_t>(state));
  };
  const absl::crc32c_t joined =
      absl::ConcatCrc32c(absl::ConcatCrc32c(of(a), of(b), part), of(c), part);
  auto rest = ~static_cast<uint32_t>(joined);
  for (size_t i = 3 * part; i < size; ++i) {
    rest = _mm_crc32_u8(rest, static_cast<unsigned char>(data[i]));
  }
  return ~rest;
}
#endif

}  // namespace

void ValuesChecksum::Add(const char* data, size_t size) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) {
    crc_ = ByInstruction(crc_, data, size);
    return;
  }
#endif
  crc_ = tensorflow::crc32c::Extend(crc_, data, size);
}

uint32_t ValuesChecksum::masked() const {
  return tensorflow::crc32c::Mask(crc_);
}

}  // namespace tfdist
