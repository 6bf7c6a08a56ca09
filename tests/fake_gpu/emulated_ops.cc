// SPDX-License-Identifier: Apache-2.0
// The collectives between GPUs, as kernels of a CPU with the label "emulated":
// all their code but one line, with stand-ins for CUDA and NCCL. They run in
// the groups of the library that tests load.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "custom_ops/gpu/gpu_all_reduce_ops.cc"
#include "custom_ops/gpu/gpu_broadcast_ops.cc"
#include "custom_ops/gpu/gpu_call.cc"
#include "custom_ops/gpu/gpu_group_ops.cc"
#include "custom_ops/gpu/gpu_links.cc"
#include "custom_ops/gpu/gpu_rows_ops.cc"
#include "custom_ops/gpu/nccl_communicator.cc"
#include "custom_ops/gpu/nccl_library.cc"
#include "tests/fake_gpu/fake.h"

namespace tfdist {

// On a GPU kernels are begun, and have not computed yet. With FAKE_GPU_LATE the
// first input, which nobody else must read, has its values a while later.
cudaStream_t StreamOf(tensorflow::OpKernelContext* ctx) {
  if (std::getenv("FAKE_GPU_LATE") == nullptr) return nullptr;
  const tensorflow::Tensor input = ctx->input(0);
  const auto data = static_cast<char*>(input.data());
  const std::string values(data, input.TotalBytes());
  std::memset(data, 0xFF, values.size());
  fake::Enqueue(nullptr, [input, data, values] {
    usleep(20000);
    std::memcpy(data, values.data(), values.size());
  });
  return nullptr;
}

}  // namespace tfdist
