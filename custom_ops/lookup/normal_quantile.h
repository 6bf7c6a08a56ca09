// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_NORMAL_QUANTILE_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_NORMAL_QUANTILE_H_

#include <cmath>

#include "custom_ops/common/target_clones.h"

namespace tfdist {

// Returns the value that a standard normal variable is below with
// `probability`, which must be in (0, 1). Algorithm AS 241 (Wichura 1988),
// PPND7: accurate to about 1e-7.
TFDIST_INLINE double NormalQuantile(double probability) {
  const double q = probability - 0.5;
  if (std::abs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q *
           (((5.9109374720e1 * r + 1.5929113202e2) * r + 5.0434271938e1) * r +
            3.3871327179) /
           (((6.7187563600e1 * r + 7.8757757664e1) * r + 1.7895169469e1) * r +
            1.0);
  }
  const double tail = q < 0 ? probability : 1 - probability;
  double r = std::sqrt(-std::log(tail));
  double value;
  if (r <= 5) {
    r -= 1.6;
    value = (((1.7023821103e-1 * r + 1.3067284816) * r + 2.7568153900) * r +
             1.4234372777) /
            ((1.2021132975e-1 * r + 7.3700164250e-1) * r + 1.0);
  } else {
    r -= 5;
    value = (((1.7337203997e-2 * r + 4.2868294337e-1) * r + 3.0812263860) * r +
             6.6579051150) /
            ((1.2258202635e-2 * r + 2.4197894225e-1) * r + 1.0);
  }
  return q < 0 ? -value : value;
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_NORMAL_QUANTILE_H_
