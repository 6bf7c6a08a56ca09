// SPDX-License-Identifier: Apache-2.0
//
// The kernels, the CPU's functors and a device's memory as C functions. Those
// that return an int return a cudaError_t.
#include <cuda_runtime.h>

#include <cstdint>

#include "custom_ops/codec/decode_ids_functor_gpu.h"
#include "custom_ops/codec/id_section.h"
#include "custom_ops/codec/rotated_mod.h"
#include "custom_ops/codec/round_functor.h"
#include "custom_ops/codec/wire_functor_gpu.h"
#include "custom_ops/common/half_floats.h"
#include "custom_ops/lookup/combine_functor_gpu.h"
#include "custom_ops/lookup/initial_rows_gpu.h"
#include "custom_ops/lookup/lookup_functor.h"
#include "custom_ops/lookup/lookup_functor_gpu.h"
#include "custom_ops/lookup/lookup_grad_functor.h"
#include "custom_ops/lookup/lookup_grad_functor_gpu.h"
#include "custom_ops/optimizer/row_update_functor_gpu.h"

namespace {

using namespace tfdist;

// Calls apply(rule) for a rule by its number and its numbers.
template <typename Apply>
int WithRule(int rule, const float* numbers, const float* mean_squares,
             const Apply& apply) {
  const float* n = numbers;
  switch (rule) {
    case 0:
      return apply(SgdRule{n[0]});
    case 1:
      return apply(MomentumRule{n[0], n[1], n[2] != 0});
    case 2:
      return apply(AdagradRule{n[0], n[1]});
    case 3:
      return apply(RowWiseAdagradRule{n[0], n[1], mean_squares});
    case 4:
      return apply(AdamRule{n[0], n[1], n[2], n[3], n[4] != 0});
    default:
      return apply(FtrlRule{n[0], n[1], n[2], n[3], n[4]});
  }
}

AdamRule Adam(const float* n) { return {n[0], n[1], n[2], n[3], n[4] != 0}; }

cudaEvent_t g_begin;
cudaEvent_t g_end;

}  // namespace

extern "C" {

int DeviceCount(int* count) { return cudaGetDeviceCount(count); }
const char* ErrorText(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
int Allocate(int64_t bytes, void** pointer) {
  return cudaMalloc(pointer, bytes);
}
int Free(void* pointer) { return cudaFree(pointer); }
int Copy(void* to, const void* from, int64_t bytes) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
int CopyOnDevice(void* to, const void* from, int64_t bytes) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, nullptr);
}
int Synchronize() { return cudaDeviceSynchronize(); }

int BeginTiming() {
  if (g_begin == nullptr) {
    cudaEventCreate(&g_begin);
    cudaEventCreate(&g_end);
  }
  return cudaEventRecord(g_begin);
}

int EndTiming(float* milliseconds) {
  cudaEventRecord(g_end);
  cudaEventSynchronize(g_end);
  return cudaEventElapsedTime(milliseconds, g_begin, g_end);
}

int Lookup(const GpuLookup* args) { return LookupGpu(*args, nullptr); }

// Of one block, whose memory is the host's.
void LookupOnCpu(const GpuLookup* args) {
  const GpuLookupBlock& block = args->blocks[0];
  const SegmentSum sum = {
      block.bfloat16 ? nullptr : static_cast<const float*>(block.table),
      block.width,
      args->row_splits,
      args->rows,
      args->weights,
      block.out};
  if (block.bfloat16) {
    SegmentSumBfloat16Cpu(sum, static_cast<const Bfloat16*>(block.table), 0,
                          args->segments);
  } else {
    SegmentSumCpu(sum, 0, args->segments);
  }
}

int Combine(const GpuCombine* args) { return CombineGpu(*args, nullptr); }

int CombineGrad(const GpuCombineGrad* args) {
  return CombineGradGpu(*args, nullptr);
}

int DecodeIds(const GpuDecodeIds* args) { return DecodeIdsGpu(*args, nullptr); }

// Of host memory; what the kernel must do.
void DecodeIdsOnCpu(const GpuDecodeIds* args) {
  args->to.row_splits[0] = 0;
  *args->status = kAllDecoded;
  for (int64_t b = args->block_count - 1; b >= 0; --b) {
    const IdBlock& block = args->blocks[b];
    const GpuIdSection& section = args->sections[block.section];
    const IdError error = ReadBlock(section.codes, block, section.row_limit,
                                    args->payload, args->to);
    if (error != IdError::kNone) {
      *args->status = b << 8 | static_cast<uint64_t>(error);
    }
  }
}

int64_t IdBlockBytes() { return sizeof(IdBlock); }
int64_t IdSectionBytes() { return sizeof(GpuIdSection); }

// Returns the bytes of a section, which it writes unless `out` is nullptr.
int64_t WriteIdSection(const int64_t* row_splits, int64_t samples,
                       const uint64_t* rows, const uint32_t* values,
                       int weighted, int running, int in_blocks, uint8_t* out) {
  SectionWriter writer;
  writer.Reserve(row_splits[samples], running);
  for (int64_t s = 0; s < samples; ++s) {
    writer.BeginSample();
    for (int64_t i = row_splits[s]; i < row_splits[s + 1]; ++i) {
      writer.AddEntry(rows[i], values[i]);
    }
  }
  const int64_t bytes = writer.Finish(weighted, in_blocks);
  if (out != nullptr) writer.Write(out);
  return bytes;
}

// Reads the header of a section of [data, data + size) at `at`. Returns how
// many blocks it has, -1 if it is malformed, and writes them unless `blocks` is
// nullptr: as section `number`, behind `sizes` samples and entries. Adds its
// own to these, and sets sizes[2] if it has weights.
int64_t PlaceIdSection(const uint8_t* data, int64_t at, int64_t size,
                       int64_t number, uint64_t row_limit, int64_t* sizes,
                       GpuIdSection* section, IdBlock* blocks) {
  SectionReader reader;
  if (reader.ReadHeader(data + at, size) != nullptr) return -1;
  *section = {reader.codes(), row_limit};
  const int64_t count = reader.blocks().size();
  for (int64_t b = 0; b < count && blocks != nullptr; ++b) {
    blocks[b] = reader.blocks()[b];
    blocks[b].section = number;
    blocks[b].at += at;
    blocks[b].weights_at += at;
    blocks[b].first_sample += sizes[0];
    blocks[b].first_entry += sizes[1];
  }
  if (blocks != nullptr) {
    sizes[0] += reader.samples();
    sizes[1] += reader.entries();
    sizes[2] |= reader.needs_weights();
  }
  return count;
}

int64_t RowGradsScratch(const GpuRowGrads* args) {
  return RowGradsScratchBytes(*args);
}

int SortRows(const GpuRowGrads* args, void* scratch) {
  return SortRowsGpu(*args, scratch, nullptr);
}

int SumRowGrads(const GpuRowGrads* args, void* scratch) {
  return SumRowGradsGpu(*args, scratch, nullptr);
}

// Entries that are in order already, as the op on a CPU gives them.
void RowGradsOnCpu(const float* grad, int64_t width, int64_t unique,
                   const int64_t* row_splits, const uint64_t* entries,
                   const float* weights, float* out) {
  RowGradSumCpu({grad, width, row_splits, entries, weights, out}, 0, unique);
}

int ApplyRows(const GpuRows* rows, int rule, const float* numbers,
              const float* mean_squares) {
  return WithRule(rule, numbers, mean_squares, [&](const auto& chosen) {
    return ApplyRowsGpu(*rows, chosen, nullptr);
  });
}

void ApplyRowsOnCpu(const GpuRows* rows, int rule, const float* numbers,
                    const float* mean_squares) {
  WithRule(rule, numbers, mean_squares, [&](const auto& chosen) {
    chosen.Apply(rows->batch, rows->buffers, 0, rows->batch.size);
    return 0;
  });
}

int ApplyAllRows(const GpuRows* rows, const float* numbers) {
  return ApplyAllRowsGpu(*rows, Adam(numbers), nullptr);
}

void ApplyAllRowsOnCpu(const GpuRows* rows, const float* numbers) {
  Adam(numbers).ApplyToAll(rows->batch, rows->buffers, 0, rows->num_rows);
}

int ClipLongRows(const GpuRows* rows, float longest, const float* squares) {
  return ClipRowsGpu(*rows, {longest, squares}, nullptr);
}

void ClipLongRowsOnCpu(const GpuRows* rows, float longest,
                       const float* squares) {
  const ClipRule rule = {longest, squares};
  rule.Apply(rows->batch, rows->buffers, 0, rows->batch.size);
}

int ScaleAllRows(const GpuRows* rows, float factor) {
  return ScaleRowsGpu(rows->buffers, rows->num_rows, rows->batch.dim, factor,
                      nullptr);
}

void ScaleAllRowsOnCpu(const GpuRows* rows, float factor) {
  ScaleRows(rows->buffers, rows->batch.dim, 0, rows->num_rows, factor);
}

int InitRows(const Block* block, const InitialValues* values, uint64_t seed,
             float* out) {
  return InitRowsGpu(*block, *values, seed, out, nullptr);
}

int ResetRows(const Block* block, const InitialValues* values, uint64_t seed,
              const ResetRow* rows, int64_t count, float* table,
              uint16_t* bfloat16_table) {
  return ResetRowsGpu(*block, *values, seed, rows, count, table, bfloat16_table,
                      nullptr);
}

// What the op makes of one element, id and column of the whole table.
float InitialValue(const InitialValues* values, uint64_t seed, int64_t id,
                   int64_t column) {
  if (values->distribution == Distribution::kConstant) return values->a;
  return values->Value(InitialValues::Words(seed, id, column)[column % 4]);
}

int64_t IdOfRow(int64_t parts, int64_t part, int64_t row) {
  return RotatedMod(parts).Id(part, row);
}

int Widen(int type, const uint16_t* in, int64_t count, float* out) {
  return WidenGpu(static_cast<WireType>(type), in, count, out, nullptr);
}

int Narrow(int type, const float* in, int64_t count, uint16_t* out) {
  return NarrowGpu(static_cast<WireType>(type), in, count, out, nullptr);
}

int NarrowAtRandom(int type, const float* in, uint64_t seed, int64_t count,
                   uint16_t* out) {
  return NarrowAtRandomGpu(static_cast<WireType>(type), in, seed, count, out,
                           nullptr);
}

void WidenOnCpu(int type, const uint16_t* in, int64_t count, float* out) {
  (type == 0 ? WidenFloat16 : WidenBfloat16)(in, count, out);
}

void NarrowOnCpu(int type, const float* in, int64_t count, uint16_t* out) {
  (type == 0 ? NarrowToFloat16 : NarrowToBfloat16)(in, count, out);
}

void NarrowAtRandomOnCpu(int type, const float* in, uint64_t seed,
                         int64_t count, uint16_t* out) {
  (type == 0 ? RoundToFloat16 : RoundToBfloat16)(in, seed, 0, count, out);
}

}  // extern "C"
