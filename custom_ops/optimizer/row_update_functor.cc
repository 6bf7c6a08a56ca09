// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/optimizer/row_update_functor.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "custom_ops/common/target_clones.h"
#include "custom_ops/optimizer/bfloat16_rows.h"
#include "custom_ops/optimizer/row_lanes.h"

namespace tfdist {
namespace {

constexpr int64_t kRowsAhead = 8;
constexpr int64_t kFloatsPerCacheLine = 16;

// One row with its gradient and slots.
struct Row {
  const float* grad;
  float* weights;
  float* slots[3];
  int64_t dim;
};

// What a rule makes of some columns of a row.
template <typename V, int kNumSlots>
struct Updated {
  V weights;
  V slots[kNumSlots];
};

template <typename V>
struct Updated<V, 0> {
  V weights;
};

template <typename V>
TFDIST_INLINE Updated<V, 0> Compute(const SgdRule& rule, const Row& row,
                                    int64_t j) {
  return {Load<V>(row.weights + j) -
          rule.learning_rate * Load<V>(row.grad + j)};
}

template <typename V>
TFDIST_INLINE Updated<V, 1> Compute(const MomentumRule& rule, const Row& row,
                                    int64_t j) {
  const V step = -rule.learning_rate * Load<V>(row.grad + j);
  const V m = rule.momentum * Load<V>(row.slots[0] + j) + step;
  // Both forms are w += keep * m + take * step.
  const float keep = rule.nesterov ? rule.momentum : 1.0f;
  const float take = rule.nesterov ? 1.0f : 0.0f;
  return {Load<V>(row.weights + j) + (keep * m + take * step), {m}};
}

template <typename V>
TFDIST_INLINE Updated<V, 1> Compute(const AdagradRule& rule, const Row& row,
                                    int64_t j) {
  const V g = Load<V>(row.grad + j);
  const V sum = Load<V>(row.slots[0] + j) + g * g;
  const V root = Sqrt(sum + rule.epsilon);
  return {Load<V>(row.weights + j) - rule.learning_rate * g / root, {sum}};
}

template <typename V>
TFDIST_INLINE Updated<V, 2> Moments(const AdamRule& rule, const Row& row,
                                    int64_t j) {
  const V g = Load<V>(row.grad + j);
  const V m = Load<V>(row.slots[0] + j);
  const V v = Load<V>(row.slots[1] + j);
  return {Load<V>(row.weights + j),
          {m + (g - m) * rule.one_minus_beta_1,
           v + (g * g - v) * rule.one_minus_beta_2}};
}

struct PlainAdam : AdamRule {
  static constexpr int kNumSlots = 2;
};

template <typename V>
TFDIST_INLINE Updated<V, 2> Compute(const PlainAdam& rule, const Row& row,
                                    int64_t j) {
  Updated<V, 2> next = Moments<V>(rule, row, j);
  next.weights -=
      rule.alpha * next.slots[0] / (Sqrt(next.slots[1]) + rule.epsilon);
  return next;
}

struct AmsGrad : AdamRule {
  static constexpr int kNumSlots = 3;
};

template <typename V>
TFDIST_INLINE Updated<V, 3> Compute(const AmsGrad& rule, const Row& row,
                                    int64_t j) {
  const Updated<V, 2> next = Moments<V>(rule, row, j);
  const V hat = Max(Load<V>(row.slots[2] + j), next.slots[1]);
  const V step = rule.alpha * next.slots[0] / (Sqrt(hat) + rule.epsilon);
  return {next.weights - step, {next.slots[0], next.slots[1], hat}};
}

template <typename V, typename PowerOf>
TFDIST_INLINE Updated<V, 2> FollowLeader(const FtrlRule& rule, const Row& row,
                                         int64_t j, const PowerOf& power) {
  const V g = Load<V>(row.grad + j);
  const V w = Load<V>(row.weights + j);
  const V n = Load<V>(row.slots[0] + j);
  const V sum = n + g * g;
  const V scaled = power(sum) * rule.inverse_learning_rate;
  const V sigma = scaled - power(n) * rule.inverse_learning_rate;
  const V z = Load<V>(row.slots[1] + j) +
              ((g + rule.twice_l2_shrinkage * w) - sigma * w);
  return {(Clip(z, rule.l1) - z) / (scaled + rule.twice_l2), {sum, z}};
}

struct SquareRootFtrl : FtrlRule {};

template <typename V>
TFDIST_INLINE Updated<V, 2> Compute(const SquareRootFtrl& rule, const Row& row,
                                    int64_t j) {
  return FollowLeader<V>(rule, row, j,
                         [](const V& x) TFDIST_ALWAYS { return Sqrt(x); });
}

struct PowerFtrl : FtrlRule {};

template <typename V>
TFDIST_INLINE Updated<V, 2> Compute(const PowerFtrl& rule, const Row& row,
                                    int64_t j) {
  return FollowLeader<V>(rule, row, j, [&](const V& x) TFDIST_ALWAYS {
    return Power(x, rule.power);
  });
}

template <typename Rule>
TFDIST_INLINE void UpdateRow(const Rule& rule, const Row& row) {
  ForEachBlock(
      row.dim,
      [&](int64_t j, auto of) TFDIST_ALWAYS {
        return Compute<typename decltype(of)::Type>(rule, row, j);
      },
      [&](int64_t j, const auto& next) TFDIST_ALWAYS {
        Store(next.weights, row.weights + j);
        for (int k = 0; k < Rule::kNumSlots; ++k) {
          if constexpr (Rule::kNumSlots > 0) {
            Store(next.slots[k], row.slots[k] + j);
          }
        }
      });
}

// Sums the lanes by halves, in the same order on every processor.
TFDIST_INLINE float Sum(const Lanes& lanes) {
  typedef float Half __attribute__((vector_size(8 * sizeof(float))));
  typedef float Quarter __attribute__((vector_size(4 * sizeof(float))));
  Half halves[2];
  std::memcpy(halves, &lanes, sizeof(lanes));
  const Half half = halves[0] + halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof(half));
  const Quarter quarter = quarters[0] + quarters[1];
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

// The last vector overlaps its neighbour, whose lanes count only once.
TFDIST_INLINE float MeanSquare(const float* grad, int64_t dim) {
  constexpr Lanes kLane = {0, 1, 2,  3,  4,  5,  6,  7,
                           8, 9, 10, 11, 12, 13, 14, 15};
  float sum = 0;
  if (dim < kLanes) {
    for (int64_t j = 0; j < dim; ++j) sum += grad[j] * grad[j];
  } else {
    const int64_t last = dim - kLanes;
    Lanes lanes = {};
    int64_t j = 0;
    for (; j < last; j += kLanes) {
      const Lanes g = Load<Lanes>(grad + j);
      lanes += g * g;
    }
    const Lanes g = Load<Lanes>(grad + last);
    lanes += kLane < static_cast<float>(j - last) ? Lanes{} : g * g;
    sum = Sum(lanes);
  }
  return sum / static_cast<float>(dim);
}

// Rows are scattered over a table larger than the caches: ask for the row a
// few positions ahead while this one is computed.
TFDIST_INLINE void PrefetchRow(const float* row, int64_t dim) {
  for (int64_t j = 0; j < dim; j += kFloatsPerCacheLine) {
    __builtin_prefetch(row + j, 1);
  }
  __builtin_prefetch(row + dim - 1, 1);
}

TFDIST_INLINE void PrefetchRow(const uint16_t* row, int64_t dim) {
  for (int64_t j = 0; j < dim; j += 2 * kFloatsPerCacheLine) {
    __builtin_prefetch(row + j, 1);
  }
  __builtin_prefetch(row + dim - 1, 1);
}

// Access to the rows of a table of either dtype; a rule sees floats.
class FloatTable {
 public:
  FloatTable(const RowBuffers& buffers, int64_t dim)
      : table_(buffers.table), dim_(dim) {}
  TFDIST_INLINE void Prefetch(int64_t row) const {
    PrefetchRow(table_ + row * dim_, dim_);
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
    PrefetchRow(table_ + row * dim_, dim_);
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

template <typename Rule>
TFDIST_INLINE void PrefetchSlots(const RowBuffers& buffers, int64_t row,
                                 int64_t dim) {
  for (int k = 0; k < Rule::kNumSlots; ++k) {
    PrefetchRow(buffers.slots[k] + row * dim, dim);
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
    if (i + kRowsAhead < end) {
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

// A few rows at a time: the sum over a row, its square root and a division
// take long one after the other, and little more for many rows at once.
template <typename Table>
TFDIST_INLINE void UpdateRowsIn(Table table, const RowWiseAdagradRule& rule,
                                const RowBatch& batch,
                                const RowBuffers& buffers, int64_t begin,
                                int64_t end) {
  const int64_t dim = batch.dim;
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t* rows = batch.rows + first;
    const float* grads = batch.grads + first * dim;
    const int64_t count = std::min(kLanes, end - first);
    float sums[kLanes] = {};
    for (int64_t k = 0; k < count; ++k) {
      __builtin_prefetch(buffers.slots[0] + rows[k], 1);
      table.Prefetch(rows[k]);
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
