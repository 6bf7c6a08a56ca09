// SPDX-License-Identifier: Apache-2.0
//
// The computation of each update rule for one row. For the formulas, see
// row_update_functor.h.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_RULES_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_RULES_H_

#include <cstdint>

#include "custom_ops/optimizer/row_numbers.h"
#include "custom_ops/optimizer/row_update_functor.h"

namespace tfdist {

// One row with its gradient and slots.
struct Row {
  const float* grad;
  float* weights;
  float* slots[3];
  int64_t dim;
};

// The result of a rule for some columns of a row.
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

// Returns the fraction to subtract from a row, computed from the sum of the
// row's squares.
TFDIST_INLINE float Excess(const ClipRule& rule, float squares) {
  const float norm = Sqrt(squares);
  return norm > rule.longest ? 1 - rule.longest / norm : 0;
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_RULES_H_
