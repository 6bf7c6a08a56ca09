// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_SCRATCH_H_
#define TFDIST_CUSTOM_OPS_COMM_SCRATCH_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace tfdist {

// Memory that is reused between steps, because new pages cost more time than
// the copy into them.
class ScratchPool {
 public:
  ScratchPool();
  // Returns at least `bytes` bytes, aligned to 64. The memory returns to the
  // pool when it is released.
  std::shared_ptr<uint8_t> Acquire(size_t bytes);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_SCRATCH_H_
