// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_GPU_GPU_CALL_H_
#define TFDIST_CUSTOM_OPS_GPU_GPU_CALL_H_

#include <memory>
#include <vector>

#include "custom_ops/comm/collective_op.h"
#include "custom_ops/comm/exchange.h"
#include "custom_ops/gpu/gpu_links.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// The dtypes of GPU kernels. Ids and packed wire formats remain on the host,
// which makes them.
inline constexpr tensorflow::DataType kGpuTypes[] = {
    tensorflow::DT_HALF, tensorflow::DT_BFLOAT16, tensorflow::DT_FLOAT,
    tensorflow::DT_DOUBLE};

// The device of GPU kernels, for REGISTER_KERNEL_BUILDER. Tests run these
// kernels on a CPU, with stand-ins for CUDA and NCCL.
#ifdef TFDIST_EMULATED
#define TFDIST_ON_GPU            \
  Device(tensorflow::DEVICE_CPU) \
      .Label("emulated")         \
      .TypeConstraint("T", kGpuTypes)
#else
#define TFDIST_ON_GPU \
  Device(tensorflow::DEVICE_GPU).TypeConstraint("T", kGpuTypes)
#endif

// Returns the CUDA stream of TensorFlow's kernels on the op's device.
cudaStream_t StreamOf(tensorflow::OpKernelContext* ctx);

// Common part of the collective calls between GPUs.
//
// With NCCL, the ranks first agree by messages on the operation and on the
// number of rows for each rank, as on a CPU. They then run the operation in its
// turn (see GpuLinks). Communication steps: two of messages without rows, and
// those of NCCL. Without NCCL, the same messages as on a CPU carry the rows,
// from and to pinned memory.
struct GpuCall {
  // Returns false, and sets the status of the context, if the group has no GPU
  // connections.
  bool Prepare(tensorflow::OpKernelContext* context,
               std::shared_ptr<Operation> of);

  // Must be called first in both Post and Run, which may run on different
  // threads.
  void Enter() const { links->Enter(); }
  // Orders later work on our stream after all work that is now on TensorFlow's
  // stream, because that work may still use the same memory.
  void FollowTensorFlow() const;
  // Copy tensors to one block of host memory, and back. Both functions block.
  std::shared_ptr<uint8_t> ToHost(
      const std::vector<tensorflow::Tensor>& tensors);
  void ToDevice(const uint8_t* data,
                const std::vector<tensorflow::Tensor*>& tensors);

  // For NCCL: ExpectTurn is called at the end of Post, RunInTurn once all ranks
  // agree.
  void ExpectTurn();
  void RunInTurn(const GpuLinks::Work& begin);

  tensorflow::OpKernelContext* ctx = nullptr;
  std::shared_ptr<Operation> operation;
  std::shared_ptr<GpuLinks> links;
  std::unique_ptr<Exchange> exchange;
  bool over_nccl = false;

 private:
  static constexpr uint32_t kTurnPart = 1;  // of the messages of the call

  cudaStream_t theirs_ = nullptr;
  Incoming* turn_ = nullptr;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_GPU_GPU_CALL_H_
