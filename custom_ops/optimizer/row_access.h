// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_ACCESS_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_ACCESS_H_

#include <cstdint>
#include <vector>

#include "custom_ops/common/prefetch_lines.h"
#include "custom_ops/common/target_clones.h"
#include "custom_ops/optimizer/bfloat16_rows.h"
#include "custom_ops/optimizer/row_update_functor.h"

namespace tfdist {

// Access to the rows of a table of either dtype. Rules see rows as floats.
class FloatTable {
 public:
  FloatTable(const RowBuffers& buffers, int64_t dim)
      : table_(buffers.table), dim_(dim) {}
  TFDIST_INLINE void Prefetch(int64_t row) const {
    PrefetchLines<true>(table_ + row * dim_, dim_);
  }
  TFDIST_INLINE float* Open(int64_t row) { return table_ + row * dim_; }
  TFDIST_INLINE void Close(int64_t row) {}

 private:
  float* table_;
  int64_t dim_;
};

class Bfloat16Table {
 public:
  Bfloat16Table(const RowBuffers& buffers, int64_t dim)
      : table_(buffers.bfloat16_table),
        rounding_(buffers.rounding),
        dim_(dim),
        opened_(dim) {}
  TFDIST_INLINE void Prefetch(int64_t row) const {
    PrefetchLines<true>(table_ + row * dim_, dim_);
  }
  TFDIST_INLINE float* Open(int64_t row) {
    WidenRow(table_ + row * dim_, dim_, opened_.data());
    return opened_.data();
  }
  TFDIST_INLINE void Close(int64_t row) {
    RoundRow(opened_.data(), dim_, rounding_, row, table_ + row * dim_);
  }

 private:
  uint16_t* table_;
  Rounding rounding_;
  int64_t dim_;
  std::vector<float> opened_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_ACCESS_H_
