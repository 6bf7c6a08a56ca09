// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/optimizer/row_update_functor.h"

#include <algorithm>
#include <cmath>

// Loops over sqrtf are vectorised only with -fno-math-errno, which the build
// passes.
//
// Compiled once per instruction set, chosen when the library is loaded. The
// choice runs before a sanitizer has set itself up, so not under one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TFDIST_CPU_CLONES \
  __attribute__((         \
      target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define TFDIST_CPU_CLONES
#endif

namespace tfdist {
namespace {

constexpr int64_t kRowsAhead = 4;
constexpr int64_t kFloatsPerCacheLine = 16;
constexpr int64_t kLanes = 16;

// Rows are scattered over a table larger than the caches: ask for the row a
// few positions ahead while this one is computed.
inline void PrefetchRow(const RowBatch& batch, int64_t i, int64_t end,
                        const float* buffer) {
  if (i + kRowsAhead >= end) return;
  const float* row = buffer + batch.rows[i + kRowsAhead] * batch.dim;
  for (int64_t j = 0; j < batch.dim; j += kFloatsPerCacheLine) {
    __builtin_prefetch(row + j, 1);
  }
}

// Sum of squares in kLanes partial sums, which the compiler may vectorise
// where one running sum would fix the order of the additions.
inline float MeanSquare(const float* grad, int64_t dim) {
  float lanes[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) {
    for (int64_t k = 0; k < kLanes; ++k) {
      lanes[k] += grad[j + k] * grad[j + k];
    }
  }
  float sum = 0;
  for (; j < dim; ++j) sum += grad[j] * grad[j];
  for (int64_t k = 0; k < kLanes; ++k) sum += lanes[k];
  return sum / static_cast<float>(dim);
}

TFDIST_CPU_CLONES
void SgdRows(const RowBatch& batch, const RowBuffers& buffers, int64_t begin,
             int64_t end, const SgdRule& rule) {
  const float learning_rate = rule.learning_rate;
  for (int64_t i = begin; i < end; ++i) {
    PrefetchRow(batch, i, end, buffers.table);
    const float* __restrict__ g = batch.grads + i * batch.dim;
    float* __restrict__ w = buffers.table + batch.rows[i] * batch.dim;
    for (int64_t j = 0; j < batch.dim; ++j) w[j] -= learning_rate * g[j];
  }
}

TFDIST_CPU_CLONES
void MomentumRows(const RowBatch& batch, const RowBuffers& buffers,
                  int64_t begin, int64_t end, const MomentumRule& rule) {
  const float learning_rate = rule.learning_rate;
  const float momentum = rule.momentum;
  // Both forms are w += keep * m + take * step with step = -lr * g.
  const float keep = rule.nesterov ? momentum : 1.0f;
  const float take = rule.nesterov ? 1.0f : 0.0f;
  for (int64_t i = begin; i < end; ++i) {
    PrefetchRow(batch, i, end, buffers.table);
    PrefetchRow(batch, i, end, buffers.slots[0]);
    const int64_t offset = batch.rows[i] * batch.dim;
    const float* __restrict__ g = batch.grads + i * batch.dim;
    float* __restrict__ w = buffers.table + offset;
    float* __restrict__ m = buffers.slots[0] + offset;
    for (int64_t j = 0; j < batch.dim; ++j) {
      const float step = -learning_rate * g[j];
      const float moved = momentum * m[j] + step;
      m[j] = moved;
      w[j] += keep * moved + take * step;
    }
  }
}

TFDIST_CPU_CLONES
void AdagradRows(const RowBatch& batch, const RowBuffers& buffers,
                 int64_t begin, int64_t end, const AdagradRule& rule) {
  const float learning_rate = rule.learning_rate;
  const float epsilon = rule.epsilon;
  for (int64_t i = begin; i < end; ++i) {
    PrefetchRow(batch, i, end, buffers.table);
    PrefetchRow(batch, i, end, buffers.slots[0]);
    const int64_t offset = batch.rows[i] * batch.dim;
    const float* __restrict__ g = batch.grads + i * batch.dim;
    float* __restrict__ w = buffers.table + offset;
    float* __restrict__ a = buffers.slots[0] + offset;
    for (int64_t j = 0; j < batch.dim; ++j) {
      const float sum = a[j] + g[j] * g[j];
      a[j] = sum;
      w[j] -= learning_rate * g[j] / std::sqrt(sum + epsilon);
    }
  }
}

TFDIST_CPU_CLONES
void RowWiseAdagradRows(const RowBatch& batch, const RowBuffers& buffers,
                        int64_t begin, int64_t end,
                        const RowWiseAdagradRule& rule) {
  for (int64_t i = begin; i < end; ++i) {
    PrefetchRow(batch, i, end, buffers.table);
    const float* __restrict__ g = batch.grads + i * batch.dim;
    float* __restrict__ w = buffers.table + batch.rows[i] * batch.dim;
    float* sum = buffers.slots[0] + batch.rows[i];
    *sum += rule.mean_squares != nullptr ? rule.mean_squares[i]
                                         : MeanSquare(g, batch.dim);
    const float rate = rule.learning_rate / std::sqrt(*sum + rule.epsilon);
    for (int64_t j = 0; j < batch.dim; ++j) w[j] -= rate * g[j];
  }
}

TFDIST_CPU_CLONES
void AdamRows(const RowBatch& batch, const RowBuffers& buffers, int64_t begin,
              int64_t end, const AdamRule& rule) {
  const AdamRule r = rule;
  for (int64_t i = begin; i < end; ++i) {
    for (const float* buffer :
         {buffers.table, buffers.slots[0], buffers.slots[1]}) {
      PrefetchRow(batch, i, end, buffer);
    }
    const int64_t offset = batch.rows[i] * batch.dim;
    const float* __restrict__ g = batch.grads + i * batch.dim;
    float* __restrict__ w = buffers.table + offset;
    float* __restrict__ m = buffers.slots[0] + offset;
    float* __restrict__ v = buffers.slots[1] + offset;
    for (int64_t j = 0; j < batch.dim; ++j) {
      m[j] += (g[j] - m[j]) * r.one_minus_beta_1;
      v[j] += (g[j] * g[j] - v[j]) * r.one_minus_beta_2;
    }
    const float* second = v;
    if (r.amsgrad) {
      float* __restrict__ hat = buffers.slots[2] + offset;
      for (int64_t j = 0; j < batch.dim; ++j) hat[j] = std::max(hat[j], v[j]);
      second = hat;
    }
    for (int64_t j = 0; j < batch.dim; ++j) {
      w[j] -= r.alpha * m[j] / (std::sqrt(second[j]) + r.epsilon);
    }
  }
}

TFDIST_CPU_CLONES
void ScaleRange(float* values, int64_t begin, int64_t end, float factor) {
  for (int64_t i = begin; i < end; ++i) values[i] *= factor;
}

}  // namespace

void SgdRule::Apply(const RowBatch& batch, const RowBuffers& buffers,
                    int64_t begin, int64_t end) const {
  SgdRows(batch, buffers, begin, end, *this);
}

void MomentumRule::Apply(const RowBatch& batch, const RowBuffers& buffers,
                         int64_t begin, int64_t end) const {
  MomentumRows(batch, buffers, begin, end, *this);
}

void AdagradRule::Apply(const RowBatch& batch, const RowBuffers& buffers,
                        int64_t begin, int64_t end) const {
  AdagradRows(batch, buffers, begin, end, *this);
}

void RowWiseAdagradRule::Apply(const RowBatch& batch, const RowBuffers& buffers,
                               int64_t begin, int64_t end) const {
  RowWiseAdagradRows(batch, buffers, begin, end, *this);
}

void AdamRule::Apply(const RowBatch& batch, const RowBuffers& buffers,
                     int64_t begin, int64_t end) const {
  AdamRows(batch, buffers, begin, end, *this);
}

void ScaleValues(float* values, int64_t begin, int64_t end, float factor) {
  ScaleRange(values, begin, end, factor);
}

}  // namespace tfdist
