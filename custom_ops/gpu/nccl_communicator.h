// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_GPU_NCCL_COMMUNICATOR_H_
#define TFDIST_CUSTOM_OPS_GPU_NCCL_COMMUNICATOR_H_

#include <cstddef>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "custom_ops/gpu/nccl_library.h"

namespace tfdist {

class NcclError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// This rank's NCCL communicator. No function here waits: work continues in the
// background, and Ready says whether NCCL has accepted it. Work may be put on a
// stream only then.
//
// All ranks must begin the same work in the same order. Calls may come from any
// thread; all throw NcclError.
class NcclCommunicator {
 public:
  // A message of `bytes` bytes from `data` to `peer`, or from `peer` into
  // `memory`.
  struct Sent {
    int peer;
    const void* data;
    size_t bytes;
  };
  struct Received {
    int peer;
    void* memory;
    size_t bytes;
  };
  struct Summed {
    const void* input;
    void* output;
    size_t count;
  };

  static std::string NewId(const NcclLibrary& nccl);

  // `id`: the id that rank 0 has created.
  NcclCommunicator(const NcclLibrary& nccl, int rank, int world_size,
                   const std::string& id);
  ~NcclCommunicator() { Abort(); }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Begins to connect; to be called once. The current CUDA device must be the
  // device of the communicator.
  void Connect();
  bool Ready();
  // Sends and receives all messages in one NCCL group. Messages of 0 bytes are
  // left out.
  void Exchange(const std::vector<Sent>& sent,
                const std::vector<Received>& received, CUstream_st* stream);
  // Sums tensors over ranks. With `factor`, sums `*factor` times the input.
  void AllReduce(const std::vector<Summed>& tensors, NcclType type,
                 const float* factor, CUstream_st* stream);
  // Ends running work without a result. Later calls fail.
  void Abort();

 private:
  void Check(NcclResult result, const char* call) const;
  ncclComm* Open() const;
  void Together(const std::function<void()>& calls) const;

  const NcclLibrary& nccl_;
  const int rank_;
  const int world_size_;
  NcclId id_ = {};
  std::mutex mutex_;  // guards the next two members and calls of NCCL
  ncclComm* comm_ = nullptr;
  bool aborted_ = false;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_GPU_NCCL_COMMUNICATOR_H_
