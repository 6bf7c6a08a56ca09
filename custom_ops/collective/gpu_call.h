// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_GPU_CALL_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_GPU_CALL_H_

#include <memory>
#include <vector>

#include "custom_ops/collective/collective_op.h"
#include "custom_ops/collective/exchange.h"
#include "custom_ops/collective/gpu_links.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// Ids and all that is packed for the wire stay with the host, which makes them.
inline constexpr tensorflow::DataType kGpuTypes[] = {
    tensorflow::DT_HALF, tensorflow::DT_BFLOAT16, tensorflow::DT_FLOAT,
    tensorflow::DT_DOUBLE};

// For REGISTER_KERNEL_BUILDER. Tests run these kernels on a CPU, with stand-ins
// for CUDA and NCCL.
#ifdef TFDIST_EMULATED
#define TFDIST_ON_GPU            \
  Device(tensorflow::DEVICE_CPU) \
      .Label("emulated")         \
      .TypeConstraint("T", kGpuTypes)
#else
#define TFDIST_ON_GPU \
  Device(tensorflow::DEVICE_GPU).TypeConstraint("T", kGpuTypes)
#endif

// The stream of TensorFlow's kernels on the op's device.
cudaStream_t StreamOf(tensorflow::OpKernelContext* ctx);

// What the calls of collectives between GPUs share.
//
// Over NCCL: the ranks tell each other by messages what they do and how many
// rows go where, as on a CPU, then run it in turn (see GpuLinks). Communication
// steps: two of messages without rows, and NCCL's. Otherwise the same messages
// as on a CPU carry the rows, from and to pinned memory.
struct GpuCall {
  // False, with the context's status set, if the group knows no GPU.
  bool Prepare(tensorflow::OpKernelContext* context,
               std::shared_ptr<Operation> of);

  // Called first by both Post and Run, which different threads may run.
  void Enter() const { links->Enter(); }
  // What our stream is given from now on comes after all that TensorFlow's has
  // been given: its memory may still be in use there.
  void FollowTensorFlow() const;
  // Copies of tensors one after another, and back. They block.
  std::shared_ptr<uint8_t> ToHost(
      const std::vector<tensorflow::Tensor>& tensors);
  void ToDevice(const uint8_t* data,
                const std::vector<tensorflow::Tensor*>& tensors);

  // Over NCCL: at the end of Post, and once all ranks agree.
  void ExpectTurn();
  void RunInTurn(const GpuLinks::Work& begin);

  tensorflow::OpKernelContext* ctx = nullptr;
  std::shared_ptr<Operation> operation;
  std::shared_ptr<GpuLinks> links;
  std::unique_ptr<Exchange> exchange;
  bool over_nccl = false;

 private:
  static constexpr uint32_t kTurnPart = 1;  // of the call's messages

  cudaStream_t theirs_ = nullptr;
  Incoming* turn_ = nullptr;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_GPU_CALL_H_
