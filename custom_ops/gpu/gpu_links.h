// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_GPU_GPU_LINKS_H_
#define TFDIST_CUSTOM_OPS_GPU_GPU_LINKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "custom_ops/comm/operation.h"
#include "custom_ops/gpu/cuda_calls.h"
#include "custom_ops/gpu/nccl_communicator.h"

namespace tfdist {

// The GPU of this rank as a group uses it: a separate stream, pinned host
// memory and, if all ranks have NCCL, a communicator. Without a communicator,
// data is copied to the host, exchanged there, and copied back.
//
// Operations of a group may run in any order, but NCCL requires the same order
// on all ranks. So the ranks first agree by messages that all have started an
// operation. Rank 0 then assigns the operation a *turn* (a number), and every
// rank begins its NCCL work in the order of the turns.
class GpuLinks {
 public:
  // `nccl` may be null. Throws CudaError.
  GpuLinks(int device, std::unique_ptr<NcclCommunicator> nccl);

  bool over_nccl() const { return nccl_ != nullptr; }
  const CudaStream& stream() const { return stream_; }
  std::shared_ptr<uint8_t> Pinned(Operation& operation, size_t bytes);
  // Must be called on each thread before any use of CUDA.
  void Enter() const { UseDevice(device_); }

  // Returns the next turn of a generation. For rank 0 only.
  int64_t GiveTurn(uint32_t generation);
  // Begins NCCL work in its turn and waits for its end. Errors are handled as
  // in Guard.
  using Work = std::function<void(NcclCommunicator&, const CudaStream&)>;
  void Run(Operation& operation, int64_t turn, const Work& begin);
  // Runs work that may fail with an error of CUDA or NCCL. If it fails, the
  // group fails too, and no GPU work is running afterwards.
  void Guard(Operation& operation, const std::function<void()>& work);
  // Waits for all work on the stream.
  void AwaitStream(Operation& operation, const char* stage);

 private:
  // Turns of the newest generation. Operations of older generations have ended.
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

#endif  // TFDIST_CUSTOM_OPS_GPU_GPU_LINKS_H_
