// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_CLOCK_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_CLOCK_H_

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace tfdist {

// Nanoseconds of a steady clock.
inline int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Nanoseconds of so many seconds, at most about a century: whoever gives a
// timeout of 1e12 wants none, and sums with it shall not overflow.
inline int64_t Nanoseconds(double seconds) {
  return static_cast<int64_t>(std::min(seconds * 1e9, 4e18));
}

// How long a number that another thread changes has stayed the same, in time
// that this process has run: see ProcessGroup::CountTime.
struct Unchanged {
  int64_t number = -1;
  int64_t lasted = 0;  // nanoseconds

  void Count(int64_t now_is, int64_t passed) {
    lasted = now_is == number ? lasted + passed : 0;
    number = now_is;
  }
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_CLOCK_H_
