// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/optimizer/row_update_functor.cu.h"

#include <cuda_runtime.h>

#include <cstdint>

namespace tfdist {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int64_t kMaxBlocks = 65535;

__device__ int64_t GlobalThread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ int64_t GridStride() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

__device__ void UpdateElement(const SgdRule& rule, const RowBuffers& buffers,
                              int64_t at, float g) {
  buffers.table[at] -= rule.learning_rate * g;
}

__device__ void UpdateElement(const MomentumRule& rule,
                              const RowBuffers& buffers, int64_t at, float g) {
  const float step = -rule.learning_rate * g;
  const float moved = rule.momentum * buffers.slots[0][at] + step;
  buffers.slots[0][at] = moved;
  buffers.table[at] += rule.nesterov ? rule.momentum * moved + step : moved;
}

__device__ void UpdateElement(const AdagradRule& rule,
                              const RowBuffers& buffers, int64_t at, float g) {
  const float sum = buffers.slots[0][at] + g * g;
  buffers.slots[0][at] = sum;
  buffers.table[at] -= rule.learning_rate * g / sqrtf(sum + rule.epsilon);
}

__device__ void UpdateElement(const AdamRule& rule, const RowBuffers& buffers,
                              int64_t at, float g) {
  float& m = buffers.slots[0][at];
  float& v = buffers.slots[1][at];
  m += (g - m) * rule.one_minus_beta_1;
  v += (g * g - v) * rule.one_minus_beta_2;
  float second = v;
  if (rule.amsgrad) {
    second = fmaxf(buffers.slots[2][at], second);
    buffers.slots[2][at] = second;
  }
  buffers.table[at] -= rule.alpha * m / (sqrtf(second) + rule.epsilon);
}

// One thread per element of grads, neighbours in a row on neighbouring threads.
template <typename Rule>
__global__ void UpdateElements(RowBatch batch, RowBuffers buffers, Rule rule) {
  const int64_t total = batch.size * batch.dim;
  for (int64_t i = GlobalThread(); i < total; i += GridStride()) {
    const int64_t row = i / batch.dim;
    const int64_t at = batch.rows[row] * batch.dim + (i - row * batch.dim);
    UpdateElement(rule, buffers, at, batch.grads[i]);
  }
}

// One warp per row: its lanes sum the squares, then update the columns.
__global__ void UpdateRowWise(RowBatch batch, RowBuffers buffers,
                              RowWiseAdagradRule rule) {
  const int lane = threadIdx.x % kWarp;
  const int64_t num_warps = GridStride() / kWarp;
  for (int64_t i = GlobalThread() / kWarp; i < batch.size; i += num_warps) {
    const float* g = batch.grads + i * batch.dim;
    float squares = 0;
    for (int64_t j = lane; j < batch.dim; j += kWarp) squares += g[j] * g[j];
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(0xffffffff, squares, offset);
    }
    const int64_t row = batch.rows[i];
    const float mean = rule.mean_squares != nullptr
                           ? rule.mean_squares[i]
                           : squares / static_cast<float>(batch.dim);
    const float sum = buffers.slots[0][row] + mean;
    __syncwarp();
    if (lane == 0) buffers.slots[0][row] = sum;
    const float rate = rule.learning_rate / sqrtf(sum + rule.epsilon);
    float* w = buffers.table + row * batch.dim;
    for (int64_t j = lane; j < batch.dim; j += kWarp) w[j] -= rate * g[j];
  }
}

int64_t NumBlocks(int64_t threads) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return blocks < kMaxBlocks ? blocks : kMaxBlocks;
}

template <typename Rule>
int Apply(const RowBatch* batch, const RowBuffers* buffers, const Rule* rule,
          void* stream) {
  const int64_t total = batch->size * batch->dim;
  if (total == 0) return 0;
  UpdateElements<<<NumBlocks(total), kThreads, 0,
                   static_cast<cudaStream_t>(stream)>>>(*batch, *buffers,
                                                        *rule);
  return cudaGetLastError();
}

}  // namespace
}  // namespace tfdist

extern "C" {

int TfdistGpuApplySgd(const tfdist::RowBatch* batch,
                      const tfdist::RowBuffers* buffers,
                      const tfdist::SgdRule* rule, void* stream) {
  return tfdist::Apply(batch, buffers, rule, stream);
}

int TfdistGpuApplyMomentum(const tfdist::RowBatch* batch,
                           const tfdist::RowBuffers* buffers,
                           const tfdist::MomentumRule* rule, void* stream) {
  return tfdist::Apply(batch, buffers, rule, stream);
}

int TfdistGpuApplyAdagrad(const tfdist::RowBatch* batch,
                          const tfdist::RowBuffers* buffers,
                          const tfdist::AdagradRule* rule, void* stream) {
  return tfdist::Apply(batch, buffers, rule, stream);
}

int TfdistGpuApplyRowWiseAdagrad(const tfdist::RowBatch* batch,
                                 const tfdist::RowBuffers* buffers,
                                 const tfdist::RowWiseAdagradRule* rule,
                                 void* stream) {
  if (batch->size == 0) return 0;
  tfdist::
      UpdateRowWise<<<tfdist::NumBlocks(batch->size * tfdist::kWarp),
                      tfdist::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          *batch, *buffers, *rule);
  return cudaGetLastError();
}

int TfdistGpuApplyAdam(const tfdist::RowBatch* batch,
                       const tfdist::RowBuffers* buffers,
                       const tfdist::AdamRule* rule, void* stream) {
  return tfdist::Apply(batch, buffers, rule, stream);
}

}  // extern "C"
