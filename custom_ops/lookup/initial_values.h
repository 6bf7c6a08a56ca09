// SPDX-License-Identifier: Apache-2.0
//
// Initial values of tables, without TensorFlow: the same on a CPU and a GPU.
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_INITIAL_VALUES_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_INITIAL_VALUES_H_

#include <array>
#include <cstdint>

#include "custom_ops/common/counter_random.h"
#include "custom_ops/lookup/normal_quantile.h"

namespace tfdist {

// One cell of a table: a row part and a column part.
struct Block {
  int64_t rows = 0;  // of the entire table
  int64_t row_part = 0;
  int64_t row_parts = 1;
  int64_t local_rows = 0;
  int64_t first_column = 0;
  int64_t local_dim = 0;
};

// A row to reset to its initial values: its id in the table, and its row in the
// cell.
struct ResetRow {
  int64_t id;
  int64_t local;
};

enum class Distribution { kConstant, kUniform, kNormal, kTruncatedNormal };

// The distribution of the elements of a table.
struct InitialValues {
  Distribution distribution = Distribution::kConstant;
  float a = 0;
  float b = 0;

  // Returns an element, computed from 32 random bits.
  TFDIST_INLINE float Value(uint32_t bits) const {
    // P(X < -2) of a standard normal variable X.
    constexpr double kTail = 0.022750131948179195;
    constexpr double kScale = 1.0 / 4294967296.0;
    const double uniform = (bits + 0.5) * kScale;
    if (distribution == Distribution::kUniform) {
      // Uses 24 bits, which are exact in float. The fraction never rounds to 1,
      // so the upper bound is never reached.
      const float fraction = static_cast<float>(bits >> 8) * 0x1p-24f;
      return a + (b - a) * fraction;
    }
    const double probability = distribution == Distribution::kNormal
                                   ? uniform
                                   : kTail + (1 - 2 * kTail) * uniform;
    return static_cast<float>(a + b * NormalQuantile(probability));
  }

  // Returns the random words that four columns share. Groups of four count from
  // column 0 of the table, so that a column part gets the same values as these
  // columns of the unpartitioned table.
  TFDIST_INLINE static std::array<uint32_t, 4> Words(uint64_t key, int64_t id,
                                                     int64_t column) {
    return Philox(key, id, column / 4);
  }
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_INITIAL_VALUES_H_
