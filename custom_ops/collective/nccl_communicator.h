// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_NCCL_COMMUNICATOR_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_NCCL_COMMUNICATOR_H_

#include <cstddef>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "custom_ops/collective/nccl_library.h"

namespace tfdist {

class NcclError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// This rank's end of a communicator of NCCL. Nothing here waits: what is begun
// goes on by itself, and Ready says whether NCCL has taken it. Work on a stream
// begins only then.
//
// Ranks must begin the same things in the same order. Calls may come from any
// thread; all throw NcclError.
class NcclCommunicator {
 public:
  // So many bytes from `data` to a rank, or from it into `memory`.
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

  // `id` is that of rank 0.
  NcclCommunicator(const NcclLibrary& nccl, int rank, int world_size,
                   const std::string& id);
  ~NcclCommunicator() { Abort(); }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Begins to connect, once. The thread's device is that of the communicator.
  void Connect();
  bool Ready();
  // All at once; those of no bytes are left out.
  void Exchange(const std::vector<Sent>& sent,
                const std::vector<Received>& received, CUstream_st* stream);
  // The sums over ranks; of `*factor` times the input if there is one.
  void AllReduce(const std::vector<Summed>& tensors, NcclType type,
                 const float* factor, CUstream_st* stream);
  // Ends what is under way, with no result, and all that comes.
  void Abort();

 private:
  void Check(NcclResult result, const char* call) const;
  ncclComm* Open() const;
  void Together(const std::function<void()>& calls) const;

  const NcclLibrary& nccl_;
  const int rank_;
  const int world_size_;
  NcclId id_ = {};
  std::mutex mutex_;  // guards the next two, and calls
  ncclComm* comm_ = nullptr;
  bool aborted_ = false;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_NCCL_COMMUNICATOR_H_
