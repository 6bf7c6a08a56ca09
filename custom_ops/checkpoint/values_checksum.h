// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CHECKPOINT_VALUES_CHECKSUM_H_
#define TFDIST_CUSTOM_OPS_CHECKPOINT_VALUES_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// The CRC-32C of bytes, computed with the instruction of the processor where it
// has one. TensorFlow's function does so only on processors that Abseil knows.
class ValuesChecksum {
 public:
  void Add(const char* data, size_t size);

  // As the files of TensorFlow have it.
  uint32_t masked() const;

 private:
  uint32_t crc_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CHECKPOINT_VALUES_CHECKSUM_H_
