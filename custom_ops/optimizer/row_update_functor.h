// SPDX-License-Identifier: Apache-2.0
//
// The update rules of the row optimizers, without TensorFlow. Every rule has
//   kNumSlots                           number of slot buffers
//   Apply(batch, buffers, begin, end)   updates rows begin to end - 1
// It may prefetch later rows of the batch.
// Apply changes only the given rows ("lazy" updates). Rows of a shard that a
// step did not look up keep their weights and slots.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_UPDATE_FUNCTOR_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_UPDATE_FUNCTOR_H_

#include <cstdint>

namespace tfdist {

// Unique rows of a shard and the gradient of each.
struct RowBatch {
  const int64_t* rows;  // [size]
  const float* grads;   // [size, dim]
  int64_t size;
  int64_t dim;
};

// The rounding of weights to bfloat16: to nearest, or stochastic, so that the
// expected result is the weight. The random bits are a function of the seed,
// the row and the column.
struct Rounding {
  bool stochastic;
  uint64_t seed;
};

// The table and its slots, all [num_rows, dim] unless a rule says otherwise.
struct RowBuffers {
  float* table;
  float* slots[3];
  uint16_t* bfloat16_table;  // used if `table` is nullptr
  Rounding rounding;
};

// w -= learning_rate * g
struct SgdRule {
  static constexpr int kNumSlots = 0;
  float learning_rate;
  void Apply(const RowBatch& batch, const RowBuffers& buffers, int64_t begin,
             int64_t end) const;
};

// m = momentum * m - learning_rate * g
// w += m, or with nesterov w += momentum * m - learning_rate * g
struct MomentumRule {
  static constexpr int kNumSlots = 1;
  float learning_rate;
  float momentum;
  bool nesterov;
  void Apply(const RowBatch& batch, const RowBuffers& buffers, int64_t begin,
             int64_t end) const;
};

// a += g^2;  w -= learning_rate * g / sqrt(a + epsilon)
struct AdagradRule {
  static constexpr int kNumSlots = 1;
  float learning_rate;
  float epsilon;
  void Apply(const RowBatch& batch, const RowBuffers& buffers, int64_t begin,
             int64_t end) const;
};

// Like Adagrad with one accumulator per row, a slot [num_rows]: a += mean(g^2).
// mean_squares [batch.size] contains these means if a rank holds only some of
// the columns. If it is nullptr, they are computed from the gradients.
struct RowWiseAdagradRule {
  static constexpr int kNumSlots = 1;
  float learning_rate;
  float epsilon;
  const float* mean_squares;
  void Apply(const RowBatch& batch, const RowBuffers& buffers, int64_t begin,
             int64_t end) const;
};

// m += (1 - beta_1) * (g - m);  v += (1 - beta_2) * (g^2 - v)
// w -= alpha * m / (sqrt(v) + epsilon)
// alpha is the bias-corrected learning rate. With amsgrad, the third slot
// stores the maximum of v and replaces v in the formula.
struct AdamRule {
  static constexpr int kNumSlots = 3;
  float alpha;
  float one_minus_beta_1;
  float one_minus_beta_2;
  float epsilon;
  bool amsgrad;
  void Apply(const RowBatch& batch, const RowBuffers& buffers, int64_t begin,
             int64_t end) const;
  // Updates rows begin to end - 1 of the table. Rows that are not in the batch
  // have a gradient of zero. The rows of the batch must be strictly ascending.
  void ApplyToAll(const RowBatch& batch, const RowBuffers& buffers,
                  int64_t begin, int64_t end) const;
};

// The Ftrl of Keras. With p(x) = x^-learning_rate_power and slots n, z:
//   s = p(n + g^2) - p(n);  n += g^2
//   z += g + 2 * l2_shrinkage * w - s / learning_rate * w
//   w = (clip(z, -l1, l1) - z) / (p(n) / learning_rate + 2 * l2)
// where l2 is the l2 of Keras plus beta / (2 * learning_rate).
struct FtrlRule {
  static constexpr int kNumSlots = 2;
  float inverse_learning_rate;
  float power;  // -learning_rate_power
  float l1;
  float twice_l2;
  float twice_l2_shrinkage;
  void Apply(const RowBatch& batch, const RowBuffers& buffers, int64_t begin,
             int64_t end) const;
};

// Scales rows whose Euclidean norm is more than `longest` down to this norm.
// The batch has no gradients. squares [batch.size] contains the sums of squares
// of entire rows if a rank holds only some of the columns. If it is nullptr,
// they are computed. A row with NaN does not change.
struct ClipRule {
  float longest;
  const float* squares;
  void Apply(const RowBatch& batch, const RowBuffers& buffers, int64_t begin,
             int64_t end) const;
};

// Multiplies rows begin to end - 1 of a table by a factor.
void ScaleRows(const RowBuffers& buffers, int64_t dim, int64_t begin,
               int64_t end, float factor);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_UPDATE_FUNCTOR_H_
