// SPDX-License-Identifier: Apache-2.0
//
// As much of CUDA's runtime as the kernels use, for one CPU: the memory of the
// device is that of the process, a stream does its work at once.
#ifndef TFDIST_TESTS_CUDA_ON_CPU_CUDA_RUNTIME_H_
#define TFDIST_TESTS_CUDA_ON_CPU_CUDA_RUNTIME_H_

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "tests/cuda_on_cpu/fibers.h"
#include "tests/cuda_on_cpu/lanes.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
// One block runs at a time.
#define __shared__ static

using cudaStream_t = void*;
using cudaError_t = int;
using cudaEvent_t = double*;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNoDevice = 100 };
enum { cudaErrorInvalidConfiguration = 9, cudaErrorMemoryAllocation = 2 };
enum { cudaErrorLaunchTimeout = 702 };
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum { cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };

namespace cuda_on_cpu {

inline cudaError_t last_error = cudaSuccess;
inline std::atomic<uint64_t> waits{0};  // of the host for an event, so far
// How many it must have come to before any of them ends.
inline std::atomic<uint64_t> waits_together{0};

// What a translated launch calls.
template <typename Kernel>
void LaunchChecked(const Kernel& kernel, dim3 grid, dim3 threads,
                   size_t shared_bytes = 0, cudaStream_t = nullptr) {
  const uint64_t per_block = uint64_t{threads.x} * threads.y * threads.z;
  const bool fits = per_block > 0 && per_block <= 1024 && threads.z <= 64 &&
                    grid.x > 0 && grid.x <= 0x7FFFFFFF && grid.y > 0 &&
                    grid.y <= 65535 && grid.z > 0 && grid.z <= 65535 &&
                    shared_bytes <= 48 << 10;
  if (!fits) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  Launch(grid, threads, shared_bytes, kernel);
}

template <typename T>
T* DynamicShared() {
  return reinterpret_cast<T*>(block.dynamic_shared.data());
}

inline double Milliseconds() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace cuda_on_cpu

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = cuda_on_cpu::last_error;
  cuda_on_cpu::last_error = cudaSuccess;
  return error;
}

inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

// Exactly as many bytes, so that AddressSanitizer sees who leaves them.
inline cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = std::malloc(bytes);
  return cudaSuccess;
}

inline cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes,
                              cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes,
                                   cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}

inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes,
                                   cudaStream_t) {
  std::memset(to, byte, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t cudaLaunchHostFunc(cudaStream_t, void (*function)(void*),
                                      void* argument) {
  function(argument);
  return cudaSuccess;
}

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new double();
  return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}

inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t = nullptr) {
  *event = cuda_on_cpu::Milliseconds();
  return cudaSuccess;
}

inline cudaError_t cudaEventSynchronize(cudaEvent_t) {
  ++cuda_on_cpu::waits;
  const double begin = cuda_on_cpu::Milliseconds();
  while (cuda_on_cpu::waits < cuda_on_cpu::waits_together) {
    if (cuda_on_cpu::Milliseconds() - begin > 20000) {
      return cudaErrorLaunchTimeout;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return cudaSuccess;
}

inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin,
                                        cudaEvent_t end) {
  *milliseconds = static_cast<float>(*end - *begin);
  return cudaSuccess;
}

#endif  // TFDIST_TESTS_CUDA_ON_CPU_CUDA_RUNTIME_H_
