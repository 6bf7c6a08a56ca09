// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "custom_ops/gpu/cuda_threads.h"
#include "custom_ops/optimizer/bfloat16_rounding.h"
#include "custom_ops/optimizer/row_quads.h"
#include "custom_ops/optimizer/row_rules.h"
#include "custom_ops/optimizer/row_update_functor_gpu.h"

namespace tfdist {
namespace {

template <typename V>
constexpr int kCountOf = sizeof(V) / sizeof(float);

// Loads some columns of a table of either dtype, as floats.
template <typename V>
__device__ V OpenColumns(const RowBuffers& buffers, int64_t at) {
  if (buffers.table != nullptr) return Load<V>(buffers.table + at);
  const auto* table = reinterpret_cast<const Bfloat16*>(buffers.bfloat16_table);
  const auto columns = LoadColumns<kCountOf<V>>(table + at);
  return Load<V>(columns.at);
}

template <typename V>
__device__ void CloseColumns(const V& weights, const RowBuffers& buffers,
                             int64_t row, int64_t dim, int64_t column) {
  const int64_t at = row * dim + column;
  if (buffers.table != nullptr) {
    *reinterpret_cast<V*>(buffers.table + at) = weights;
    return;
  }
  const uint32_t row_bits = RowBits(buffers.rounding.seed, row);
  Columns<uint16_t, kCountOf<V>> rounded;
  for (int k = 0; k < kCountOf<V>; ++k) {
    rounded.at[k] =
        RoundedNumber(BitsOf(ColumnOf(weights, k)), buffers.rounding.stochastic,
                      static_cast<uint32_t>(column + k), row_bits);
  }
  *reinterpret_cast<Columns<uint16_t, kCountOf<V>>*>(buffers.bfloat16_table +
                                                     at) = rounded;
}

// Applies the rule to some columns of a row.
template <typename V, typename Rule>
__device__ void UpdateColumns(const Rule& rule, const GpuRows& args,
                              const float* grad, int64_t row, int64_t column) {
  const int64_t at = row * args.batch.dim + column;
  alignas(16) V weights = OpenColumns<V>(args.buffers, at);
  Row opened = {grad, reinterpret_cast<float*>(&weights), {}, args.batch.dim};
  for (int k = 0; k < Rule::kNumSlots; ++k) {
    opened.slots[k] = args.buffers.slots[k] + at;
  }
  const auto next = Compute<V>(rule, opened, 0);
  if constexpr (Rule::kNumSlots > 0) {
    for (int k = 0; k < Rule::kNumSlots; ++k) {
      *reinterpret_cast<V*>(opened.slots[k]) = next.slots[k];
    }
  }
  CloseColumns(next.weights, args.buffers, row, args.batch.dim, column);
}

// Returns the row at a position of the batch. If the row is not in the table,
// returns -1 and, with `note`, records the position.
__device__ int64_t RowAt(const GpuRows& args, int64_t position, bool note) {
  const int64_t row = args.batch.rows[position];
  if (static_cast<uint64_t>(row) < static_cast<uint64_t>(args.num_rows)) {
    return row;
  }
  if (note) {
    atomicMin(reinterpret_cast<unsigned long long*>(args.bad_row),
              static_cast<unsigned long long>(position));
  }
  return -1;
}

// A group of threads updates one row at a time. Each thread updates the columns
// of one V, and reads and writes weights, slots and gradient once.
template <typename V, typename Rule>
__global__ void UpdateRowsKernel(GpuRows args, Rule rule, int group) {
  const int64_t dim = args.batch.dim;
  const int64_t first = threadIdx.x % group * kCountOf<V>;
  for (int64_t i = FirstUnit(group); i < args.batch.size;
       i += UnitStride(group)) {
    const int64_t row = RowAt(args, i, first == 0);
    if (row < 0) continue;
    for (int64_t column = first; column < dim; column += group * kCountOf<V>) {
      UpdateColumns<V>(rule, args, args.batch.grads + i * dim + column, row,
                       column);
    }
  }
}

// Returns the sum of the squares of a row to all threads of its group. The
// order of the sum is fixed: first the columns of each thread, then the threads
// by halves of the group.
template <typename V, typename Columns>
__device__ float SumSquares(int64_t dim, int group, const Columns& columns) {
  float sum = 0;
  for (int64_t column = threadIdx.x % group * kCountOf<V>; column < dim;
       column += group * kCountOf<V>) {
    const V x = columns(column);
    for (int k = 0; k < kCountOf<V>; ++k) sum += ColumnOf(x * x, k);
  }
  const int lane = threadIdx.x % kWarpThreads;
  const unsigned mask = static_cast<unsigned>(((uint64_t{1} << group) - 1)
                                              << (lane / group * group));
  for (int half = group / 2; half > 0; half /= 2) {
    sum += __shfl_xor_sync(mask, sum, half, group);
  }
  return sum;
}

// A group of threads updates one row at a time. The threads jointly sum the
// squares of the row's gradient. Each thread then updates the columns of one V.
template <typename V>
__global__ void RowWiseAdagradKernel(GpuRows args, RowWiseAdagradRule rule,
                                     int group) {
  const int64_t dim = args.batch.dim;
  const int64_t first = threadIdx.x % group * kCountOf<V>;
  for (int64_t i = FirstUnit(group); i < args.batch.size;
       i += UnitStride(group)) {
    const int64_t row = RowAt(args, i, first == 0);
    if (row < 0) continue;
    const float* grad = args.batch.grads + i * dim;
    float mean = 0;
    if (rule.mean_squares != nullptr) {
      mean = rule.mean_squares[i];
    } else {
      const auto columns = [&](int64_t j) { return Load<V>(grad + j); };
      mean = SumSquares<V>(dim, group, columns) / static_cast<float>(dim);
    }
    float* slot = args.buffers.slots[0] + row;
    const float sum = *slot + mean;
    const unsigned lane = threadIdx.x % kWarpThreads;
    __syncwarp(static_cast<unsigned>(((uint64_t{1} << group) - 1)
                                     << (lane / group * group)));
    if (first == 0) *slot = sum;
    const SgdRule sgd = {rule.learning_rate / Sqrt(sum + rule.epsilon)};
    for (int64_t column = first; column < dim; column += group * kCountOf<V>) {
      UpdateColumns<V>(sgd, args, grad + column, row, column);
    }
  }
}

// A group of threads clips one row at a time. The threads jointly sum the
// squares of the row. If its norm is too large, each thread then scales the
// columns of one V.
template <typename V>
__global__ void ClipRowsKernel(GpuRows args, ClipRule rule, int group) {
  const int64_t dim = args.batch.dim;
  const int64_t first = threadIdx.x % group * kCountOf<V>;
  for (int64_t i = FirstUnit(group); i < args.batch.size;
       i += UnitStride(group)) {
    const int64_t row = RowAt(args, i, first == 0);
    if (row < 0) continue;
    const auto columns = [&](int64_t j) {
      return OpenColumns<V>(args.buffers, row * dim + j);
    };
    const float excess = Excess(rule, rule.squares != nullptr
                                          ? rule.squares[i]
                                          : SumSquares<V>(dim, group, columns));
    if (excess == 0) continue;
    for (int64_t column = first; column < dim; column += group * kCountOf<V>) {
      const V weights = columns(column);
      CloseColumns(weights - excess * weights, args.buffers, row, dim, column);
    }
  }
}

// Returns the position of `row` in the ascending rows of the batch; the size of
// the batch if it is not there.
__device__ int64_t PositionOf(const RowBatch& batch, int64_t row) {
  int64_t low = 0;
  int64_t high = batch.size;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (batch.rows[middle] < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < batch.size && batch.rows[low] == row ? low : batch.size;
}

// A group of threads updates one row of the table at a time. Each thread finds
// the row in the batch and updates the columns of one V.
template <typename V, typename Rule>
__global__ void UpdateAllRowsKernel(GpuRows args, Rule rule, int group) {
  const int64_t dim = args.batch.dim;
  const int64_t first = threadIdx.x % group * kCountOf<V>;
  const V zero = {};
  for (int64_t row = FirstUnit(group); row < args.num_rows;
       row += UnitStride(group)) {
    const int64_t i = PositionOf(args.batch, row);
    for (int64_t column = first; column < dim; column += group * kCountOf<V>) {
      const float* grad = i < args.batch.size
                              ? args.batch.grads + i * dim + column
                              : reinterpret_cast<const float*>(&zero);
      UpdateColumns<V>(rule, args, grad, row, column);
    }
  }
}

// Each thread multiplies the columns of one V.
template <typename V>
__global__ void ScaleKernel(RowBuffers buffers, int64_t num_rows, int64_t dim,
                            float factor) {
  const int64_t pieces = dim / kCountOf<V>;
  for (int64_t i = FirstUnit(); i < num_rows * pieces; i += UnitStride()) {
    const int64_t row = i / pieces;
    const int64_t column = i % pieces * kCountOf<V>;
    const V weights = OpenColumns<V>(buffers, row * dim + column);
    CloseColumns(weights * factor, buffers, row, dim, column);
  }
}

// Whether all rows begin at an address that is aligned for a Quad.
bool InQuads(const RowBuffers& buffers, const float* grads, int64_t dim,
             int slots) {
  bool whole = dim % 4 == 0 && IsAligned(buffers.table, 16) &&
               IsAligned(buffers.bfloat16_table, 8) && IsAligned(grads, 16);
  for (int k = 0; k < slots; ++k) whole &= IsAligned(buffers.slots[k], 16);
  return whole;
}

// Calls `run` with a rule type that has some options as compile-time constants.
template <typename Rule, typename Run>
int WithKernelRule(const Rule& rule, const Run& run) {
  return run(rule);
}

template <typename Run>
int WithKernelRule(const AdamRule& rule, const Run& run) {
  return rule.amsgrad ? run(AmsGrad{rule}) : run(PlainAdam{rule});
}

template <typename Run>
int WithKernelRule(const FtrlRule& rule, const Run& run) {
  return rule.power == 0.5f ? run(SquareRootFtrl{rule}) : run(PowerFtrl{rule});
}

template <typename V, typename Rule>
int Launch(const GpuRows& rows, const Rule& rule, void* stream) {
  const int group = GroupOf(rows.batch.dim / kCountOf<V>);
  const unsigned blocks = Blocks(rows.batch.size, group);
  if constexpr (std::is_same<Rule, RowWiseAdagradRule>::value) {
    RowWiseAdagradKernel<V>
        <<<blocks, kBlockThreads, 0, StreamOf(stream)>>>(rows, rule, group);
  } else {
    UpdateRowsKernel<V>
        <<<blocks, kBlockThreads, 0, StreamOf(stream)>>>(rows, rule, group);
  }
  return cudaGetLastError();
}

template <typename V, typename Rule>
int LaunchAll(const GpuRows& rows, const Rule& rule, void* stream) {
  const int group = GroupOf(rows.batch.dim / kCountOf<V>);
  const unsigned blocks = Blocks(rows.num_rows, group);
  UpdateAllRowsKernel<V>
      <<<blocks, kBlockThreads, 0, StreamOf(stream)>>>(rows, rule, group);
  return cudaGetLastError();
}

}  // namespace

template <typename Rule>
int ApplyRowsGpu(const GpuRows& rows, const Rule& rule, void* stream) {
  if (rows.batch.size == 0 || rows.batch.dim == 0) return cudaSuccess;
  return WithKernelRule(rule, [&](const auto& constant) {
    using Constant = std::decay_t<decltype(constant)>;
    const int slots =
        std::is_same<Rule, RowWiseAdagradRule>::value ? 0 : Constant::kNumSlots;
    return InQuads(rows.buffers, rows.batch.grads, rows.batch.dim, slots)
               ? Launch<Quad>(rows, constant, stream)
               : Launch<float>(rows, constant, stream);
  });
}

template int ApplyRowsGpu(const GpuRows&, const SgdRule&, void*);
template int ApplyRowsGpu(const GpuRows&, const MomentumRule&, void*);
template int ApplyRowsGpu(const GpuRows&, const AdagradRule&, void*);
template int ApplyRowsGpu(const GpuRows&, const RowWiseAdagradRule&, void*);
template int ApplyRowsGpu(const GpuRows&, const AdamRule&, void*);
template int ApplyRowsGpu(const GpuRows&, const FtrlRule&, void*);

int ClipRowsGpu(const GpuRows& rows, const ClipRule& rule, void* stream) {
  const int64_t dim = rows.batch.dim;
  if (rows.batch.size == 0 || dim == 0) return cudaSuccess;
  const int columns = InQuads(rows.buffers, nullptr, dim, 0) ? 4 : 1;
  const int group = GroupOf(dim / columns);
  const unsigned blocks = Blocks(rows.batch.size, group);
  if (columns == 4) {
    ClipRowsKernel<Quad>
        <<<blocks, kBlockThreads, 0, StreamOf(stream)>>>(rows, rule, group);
  } else {
    ClipRowsKernel<float>
        <<<blocks, kBlockThreads, 0, StreamOf(stream)>>>(rows, rule, group);
  }
  return cudaGetLastError();
}

int ApplyAllRowsGpu(const GpuRows& rows, const AdamRule& rule, void* stream) {
  if (rows.num_rows == 0 || rows.batch.dim == 0) return cudaSuccess;
  return WithKernelRule(rule, [&](const auto& constant) {
    return InQuads(rows.buffers, rows.batch.grads, rows.batch.dim,
                   constant.kNumSlots)
               ? LaunchAll<Quad>(rows, constant, stream)
               : LaunchAll<float>(rows, constant, stream);
  });
}

int ScaleRowsGpu(const RowBuffers& buffers, int64_t num_rows, int64_t dim,
                 float factor, void* stream) {
  if (num_rows == 0 || dim == 0) return cudaSuccess;
  if (InQuads(buffers, nullptr, dim, 0)) {
    ScaleKernel<Quad>
        <<<Blocks(num_rows * dim / 4), kBlockThreads, 0, StreamOf(stream)>>>(
            buffers, num_rows, dim, factor);
  } else {
    ScaleKernel<float>
        <<<Blocks(num_rows * dim), kBlockThreads, 0, StreamOf(stream)>>>(
            buffers, num_rows, dim, factor);
  }
  return cudaGetLastError();
}

}  // namespace tfdist
