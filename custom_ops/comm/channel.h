// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_CHANNEL_H_
#define TFDIST_CUSTOM_OPS_COMM_CHANNEL_H_

#include <cstdint>
#include <deque>
#include <functional>

namespace tfdist {

// The state of one tag on this rank. Operations of the same tag run one after
// another. `waiting` holds operations that were started while another one was
// running.
struct Channel {
  uint64_t calls = 0;
  bool busy = false;
  std::deque<std::function<void()>> waiting;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_CHANNEL_H_
