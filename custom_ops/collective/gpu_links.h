// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_GPU_LINKS_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_GPU_LINKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "custom_ops/collective/nccl_communicator.h"
#include "custom_ops/collective/operation.h"
#include "custom_ops/common/cuda_calls.h"

namespace tfdist {

// This rank's GPU as a group uses it: a stream of its own, pinned host memory
// and, where all ranks have it, a communicator of NCCL. Without one, data is
// copied to the host, exchanged there, and copied back.
//
// Operations of a group run in any order, those of NCCL must not. So ranks
// agree first, by messages, that all are in an operation; then rank 0 gives it
// a *turn*, and every rank begins work of NCCL by turns.
class GpuLinks {
 public:
  // `nccl` may be null. Throws CudaError.
  GpuLinks(int device, std::unique_ptr<NcclCommunicator> nccl);

  bool over_nccl() const { return nccl_ != nullptr; }
  const CudaStream& stream() const { return stream_; }
  std::shared_ptr<uint8_t> Pinned(Operation& operation, size_t bytes);
  // Must be called on each thread before any use of CUDA.
  void Enter() const { UseDevice(device_); }

  // On rank 0: the next turn of a generation.
  int64_t GiveTurn(uint32_t generation);
  // Begins work of NCCL in its turn and awaits its end, guarded.
  using Work = std::function<void(NcclCommunicator&, const CudaStream&)>;
  void Run(Operation& operation, int64_t turn, const Work& begin);
  // Does what may fail for reasons of CUDA or NCCL. If it does, so does the
  // group; nothing is under way afterwards.
  void Guard(Operation& operation, const std::function<void()>& work);
  // Awaits all that the stream has been given.
  void AwaitStream(Operation& operation, const char* stage);

 private:
  // Turns of the newest generation; older ones have left.
  struct Turns {
    uint32_t generation = 0;
    int64_t next = 0;
  };
  static void Renew(Turns& turns, uint32_t generation);
  bool IsTurn(uint32_t generation, int64_t turn);
  void EndTurn(uint32_t generation);

  const int device_;
  const CudaStream stream_;
  PinnedPool pinned_;
  const std::unique_ptr<NcclCommunicator> nccl_;
  std::mutex mutex_;  // guards the next two
  Turns given_;
  Turns begun_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_GPU_LINKS_H_
