// SPDX-License-Identifier: Apache-2.0
//
// The kernels of the ops for GPUs, for a CPU and under a label of their own.
#include "custom_ops/codec/decode_ids_gpu_kernels.cc"
#include "custom_ops/codec/wire_gpu_kernels.cc"
#include "custom_ops/lookup/combine_gpu_kernels.cc"
#include "custom_ops/lookup/init_rows_gpu_kernels.cc"
#include "custom_ops/lookup/lookup_gpu_kernels.cc"
#include "custom_ops/lookup/lookup_grad_gpu_kernels.cc"
#include "custom_ops/lookup/pool_gpu_kernels.cc"
#include "custom_ops/optimizer/reset_rows_gpu_kernels.cc"
#include "custom_ops/optimizer/update_gpu_kernels.cc"

// How often a kernel was launched, and how often the host waited.
extern "C" uint64_t Launches() { return cuda_on_cpu::launches; }
extern "C" uint64_t Waits() { return cuda_on_cpu::waits; }
// The next waits all end together.
extern "C" void WaitTogether(uint64_t count) {
  cuda_on_cpu::waits_together = cuda_on_cpu::waits + count;
}
