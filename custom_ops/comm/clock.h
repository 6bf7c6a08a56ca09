// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_CLOCK_H_
#define TFDIST_CUSTOM_OPS_COMM_CLOCK_H_

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace tfdist {

// Returns the time of a steady clock, in nanoseconds.
inline int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Converts seconds to nanoseconds, at most about a century. A user may pass a
// timeout of 1e12 to mean no timeout; sums with the result must not overflow.
inline int64_t Nanoseconds(double seconds) {
  return static_cast<int64_t>(std::min(seconds * 1e9, 4e18));
}

// Measures how long a number that another thread changes has stayed the same,
// in time that this process has run. See ProcessGroup::CountTime.
struct Unchanged {
  int64_t number = -1;
  int64_t lasted = 0;  // nanoseconds

  void Count(int64_t now_is, int64_t passed) {
    lasted = now_is == number ? lasted + passed : 0;
    number = now_is;
  }
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_CLOCK_H_
