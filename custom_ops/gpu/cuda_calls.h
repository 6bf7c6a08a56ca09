// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_GPU_CUDA_CALLS_H_
#define TFDIST_CUSTOM_OPS_GPU_CUDA_CALLS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "custom_ops/common/message.h"

namespace tfdist {

// All calls of the CUDA runtime by host code, so that tests can replace them.
// Every call throws CudaError if CUDA returns an error.
class CudaError : public std::runtime_error {
 public:
  CudaError(const char* call, cudaError_t code)
      : std::runtime_error(Message(call, ": ", cudaGetErrorString(code),
                                   " (CUDA error ", static_cast<int>(code),
                                   ")")) {}
};

inline void CheckCuda(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw CudaError(call, code);
}

// Sets the device of the calling thread.
inline void UseDevice(int device) {
  CheckCuda(cudaSetDevice(device), "cudaSetDevice");
}

// Returns the total memory of the current device, in bytes.
inline int64_t MemoryOfDevice() {
  size_t free = 0, total = 0;
  CheckCuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<int64_t>(total);
}

inline std::string BusIdOf(int device) {
  char text[64] = {};
  CheckCuda(cudaDeviceGetPCIBusId(text, sizeof(text), device),
            "cudaDeviceGetPCIBusId");
  return text;
}

class CudaStream {
 public:
  CudaStream() {
    CheckCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
              "cudaStreamCreate");
  }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cudaStream_t get() const { return stream_; }
  void Copy(void* to, const void* from, size_t bytes) const {
    if (bytes == 0) return;
    CheckCuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_),
              "cudaMemcpyAsync");
  }
  void Zero(void* memory, size_t bytes) const {
    if (bytes == 0) return;
    CheckCuda(cudaMemsetAsync(memory, 0, bytes, stream_), "cudaMemsetAsync");
  }
  // Blocks until all work on the stream has completed or failed.
  void Drain() const { (void)cudaStreamSynchronize(stream_); }

 private:
  cudaStream_t stream_ = nullptr;
};

// A point in a stream: the work that the stream has received so far.
class CudaEvent {
 public:
  explicit CudaEvent(cudaStream_t stream) {
    CheckCuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming),
              "cudaEventCreate");
    const cudaError_t code = cudaEventRecord(event_, stream);
    if (code == cudaSuccess) return;
    cudaEventDestroy(event_);
    throw CudaError("cudaEventRecord", code);
  }
  ~CudaEvent() { cudaEventDestroy(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  bool Over() const {
    const cudaError_t code = cudaEventQuery(event_);
    if (code == cudaErrorNotReady) return false;
    CheckCuda(code, "cudaEventQuery");
    return true;
  }
  // Orders all later work on `stream` after this event.
  void Precedes(const CudaStream& stream) const {
    CheckCuda(cudaStreamWaitEvent(stream.get(), event_, 0),
              "cudaStreamWaitEvent");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Host memory that a GPU can copy from and to directly. It is reused between
// steps, because pinning memory takes longer than copying it.
class PinnedPool {
 public:
  // Returns at least `bytes` bytes. The memory returns to the pool when it is
  // released.
  std::shared_ptr<uint8_t> Acquire(size_t bytes) {
    std::shared_ptr<State> state = state_;
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      const auto found = state->free.lower_bound(bytes);
      if (found != state->free.end() && found->first / 2 <= bytes) {
        const auto [size, memory] = *found;
        state->free.erase(found);
        return Lend(state, memory, size);
      }
    }
    void* memory = nullptr;
    CheckCuda(cudaHostAlloc(&memory, bytes + 1, cudaHostAllocDefault),
              "cudaHostAlloc");
    return Lend(state, static_cast<uint8_t*>(memory), bytes);
  }

 private:
  struct State {
    ~State() {
      for (auto& [_, memory] : free) cudaFreeHost(memory);
    }
    std::mutex mutex;
    std::multimap<size_t, uint8_t*> free;
  };

  static std::shared_ptr<uint8_t> Lend(std::shared_ptr<State> state,
                                       uint8_t* memory, size_t size) {
    return {memory, [state = std::move(state), size](uint8_t* back) {
              std::lock_guard<std::mutex> lock(state->mutex);
              state->free.emplace(size, back);
            }};
  }

  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_GPU_CUDA_CALLS_H_
