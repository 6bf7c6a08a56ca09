// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/optimizer/row_update_functor.h"

#include <algorithm>
#include <vector>

#include "custom_ops/common/target_clones.h"
#include "custom_ops/optimizer/row_access.h"
#include "custom_ops/optimizer/row_rules.h"
#include "custom_ops/optimizer/update_row.h"

namespace tfdist {
namespace {

constexpr int64_t kRowsAhead = 8;

template <typename Rule>
TFDIST_INLINE void PrefetchSlots(const RowBuffers& buffers, int64_t row,
                                 int64_t dim) {
  for (int k = 0; k < Rule::kNumSlots; ++k) {
    PrefetchLines<true>(buffers.slots[k] + row * dim, dim);
  }
}

template <typename Rule>
TFDIST_INLINE void UpdateRowOf(const Rule& rule, const RowBuffers& buffers,
                               const float* grad, int64_t row, int64_t dim,
                               float* weights) {
  Row opened = {grad, weights, {}, dim};
  for (int k = 0; k < Rule::kNumSlots; ++k) {
    opened.slots[k] = buffers.slots[k] + row * dim;
  }
  UpdateRow(rule, opened);
}

template <typename Table, typename Rule>
TFDIST_INLINE void UpdateRowsIn(Table table, const Rule& rule,
                                const RowBatch& batch,
                                const RowBuffers& buffers, int64_t begin,
                                int64_t end) {
  const int64_t dim = batch.dim;
  for (int64_t i = begin; i < end; ++i) {
    if (i + kRowsAhead < batch.size) {
      const int64_t ahead = batch.rows[i + kRowsAhead];
      table.Prefetch(ahead);
      PrefetchSlots<Rule>(buffers, ahead, dim);
    }
    const int64_t row = batch.rows[i];
    UpdateRowOf(rule, buffers, batch.grads + i * dim, row, dim,
                table.Open(row));
    table.Close(row);
  }
}

// Processes kLanes rows at a time. The sum over a row, its square root and the
// division depend on each other and have a long latency, which is little longer
// for several rows at once.
template <typename Table>
TFDIST_INLINE void UpdateRowsIn(Table table, const RowWiseAdagradRule& rule,
                                const RowBatch& batch,
                                const RowBuffers& buffers, int64_t begin,
                                int64_t end) {
  const int64_t dim = batch.dim;
  const auto prefetch = [&](int64_t i) TFDIST_ALWAYS {
    if (i >= batch.size) return;
    __builtin_prefetch(buffers.slots[0] + batch.rows[i], 1);
    table.Prefetch(batch.rows[i]);
  };
  for (int64_t k = 0; k < kLanes && begin + k < end; ++k) prefetch(begin + k);
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t* rows = batch.rows + first;
    const float* grads = batch.grads + first * dim;
    const int64_t count = std::min(kLanes, end - first);
    float sums[kLanes] = {};
    for (int64_t k = 0; k < count; ++k) {
      prefetch(first + kLanes + k);
      sums[k] = rule.mean_squares != nullptr ? rule.mean_squares[first + k]
                                             : MeanSquare(grads + k * dim, dim);
    }
    for (int64_t k = 0; k < count; ++k) {
      float* sum = buffers.slots[0] + rows[k];
      sums[k] += *sum;
      *sum = sums[k];
    }
    float rates[kLanes];
    Store(rule.learning_rate / Sqrt(Load<Lanes>(sums) + rule.epsilon), rates);
    for (int64_t k = 0; k < count; ++k) {
      UpdateRow(SgdRule{rates[k]},
                {grads + k * dim, table.Open(rows[k]), {}, dim});
      table.Close(rows[k]);
    }
  }
}

template <typename Table>
TFDIST_INLINE void UpdateRowsIn(Table table, const ClipRule& rule,
                                const RowBatch& batch,
                                const RowBuffers& buffers, int64_t begin,
                                int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = batch.rows[i];
    float* weights = table.Open(row);
    const float excess =
        Excess(rule, rule.squares != nullptr ? rule.squares[i]
                                             : SumSquares(weights, batch.dim));
    if (excess == 0) continue;
    for (int64_t j = 0; j < batch.dim; ++j) weights[j] -= excess * weights[j];
    table.Close(row);
  }
}

template <typename Rule>
TFDIST_INLINE void UpdateRows(const Rule& rule, const RowBatch& batch,
                              const RowBuffers& buffers, int64_t begin,
                              int64_t end) {
  if (batch.dim == 0) return;
  if (buffers.table != nullptr) {
    UpdateRowsIn(FloatTable(buffers, batch.dim), rule, batch, buffers, begin,
                 end);
  } else {
    UpdateRowsIn(Bfloat16Table(buffers, batch.dim), rule, batch, buffers, begin,
                 end);
  }
}

template <typename Table, typename Rule>
TFDIST_INLINE void UpdateAllRowsIn(Table table, const Rule& rule,
                                   const RowBatch& batch,
                                   const RowBuffers& buffers, int64_t begin,
                                   int64_t end) {
  const int64_t dim = batch.dim;
  const std::vector<float> zeros(dim);
  int64_t i =
      std::lower_bound(batch.rows, batch.rows + batch.size, begin) - batch.rows;
  for (int64_t row = begin; row < end; ++row) {
    const bool named = i < batch.size && batch.rows[i] == row;
    UpdateRowOf(rule, buffers, named ? batch.grads + i * dim : zeros.data(),
                row, dim, table.Open(row));
    table.Close(row);
    i += named;
  }
}

template <typename Rule>
TFDIST_INLINE void UpdateAllRows(const Rule& rule, const RowBatch& batch,
                                 const RowBuffers& buffers, int64_t begin,
                                 int64_t end) {
  if (batch.dim == 0) return;
  if (buffers.table != nullptr) {
    UpdateAllRowsIn(FloatTable(buffers, batch.dim), rule, batch, buffers, begin,
                    end);
  } else {
    UpdateAllRowsIn(Bfloat16Table(buffers, batch.dim), rule, batch, buffers,
                    begin, end);
  }
}

}  // namespace

TFDIST_CLONES
void SgdRule::Apply(const RowBatch& batch, const RowBuffers& buffers,
                    int64_t begin, int64_t end) const {
  UpdateRows(*this, batch, buffers, begin, end);
}

TFDIST_CLONES
void MomentumRule::Apply(const RowBatch& batch, const RowBuffers& buffers,
                         int64_t begin, int64_t end) const {
  UpdateRows(*this, batch, buffers, begin, end);
}

TFDIST_CLONES
void AdagradRule::Apply(const RowBatch& batch, const RowBuffers& buffers,
                        int64_t begin, int64_t end) const {
  UpdateRows(*this, batch, buffers, begin, end);
}

TFDIST_CLONES
void RowWiseAdagradRule::Apply(const RowBatch& batch, const RowBuffers& buffers,
                               int64_t begin, int64_t end) const {
  UpdateRows(*this, batch, buffers, begin, end);
}

TFDIST_CLONES
void AdamRule::Apply(const RowBatch& batch, const RowBuffers& buffers,
                     int64_t begin, int64_t end) const {
  if (amsgrad) {
    UpdateRows(AmsGrad{*this}, batch, buffers, begin, end);
  } else {
    UpdateRows(PlainAdam{*this}, batch, buffers, begin, end);
  }
}

TFDIST_CLONES
void FtrlRule::Apply(const RowBatch& batch, const RowBuffers& buffers,
                     int64_t begin, int64_t end) const {
  if (power == 0.5f) {
    UpdateRows(SquareRootFtrl{*this}, batch, buffers, begin, end);
  } else {
    UpdateRows(PowerFtrl{*this}, batch, buffers, begin, end);
  }
}

TFDIST_CLONES
void ClipRule::Apply(const RowBatch& batch, const RowBuffers& buffers,
                     int64_t begin, int64_t end) const {
  UpdateRows(*this, batch, buffers, begin, end);
}

TFDIST_CLONES
void AdamRule::ApplyToAll(const RowBatch& batch, const RowBuffers& buffers,
                          int64_t begin, int64_t end) const {
  if (amsgrad) {
    UpdateAllRows(AmsGrad{*this}, batch, buffers, begin, end);
  } else {
    UpdateAllRows(PlainAdam{*this}, batch, buffers, begin, end);
  }
}

TFDIST_CLONES
void ScaleRows(const RowBuffers& buffers, int64_t dim, int64_t begin,
               int64_t end, float factor) {
  if (buffers.table != nullptr) {
    for (int64_t i = begin * dim; i < end * dim; ++i) {
      buffers.table[i] *= factor;
    }
    return;
  }
  Bfloat16Table table(buffers, dim);
  for (int64_t row = begin; row < end; ++row) {
    float* weights = table.Open(row);
    for (int64_t j = 0; j < dim; ++j) weights[j] *= factor;
    table.Close(row);
  }
}

}  // namespace tfdist
