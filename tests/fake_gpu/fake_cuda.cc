// SPDX-License-Identifier: Apache-2.0
// CUDA's runtime on a CPU: each stream is a thread that does what it is given,
// late, so that what does not wait for it reads and writes too early.
//
// Environment:
//   FAKE_GPU_SHARED: all devices are the same one.
//   FAKE_GPU_NO_MEMORY: no host memory can be pinned.
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "tests/fake_gpu/fake.h"

struct CUstream_st {
  CUstream_st() : worker([this] { Work(); }) {}
  ~CUstream_st() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      ending = true;
    }
    changed.notify_all();
    worker.join();
  }

  void Work() {
    for (unsigned int round = 1;; ++round) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return ending || !queue.empty(); });
        if (queue.empty()) return;
        work = std::move(queue.front());
        queue.pop_front();
      }
      usleep(round * 7919 % 400);
      work();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool ending = false;
  std::thread worker;
};

// Recorded again, an event is another one for who waits from then on.
struct CUevent_st {
  std::shared_ptr<std::atomic<bool>> over;
};

namespace fake {

namespace {

std::atomic<int> open_count{0};

// TensorFlow's, where kernels of a CPU stand in for those of a GPU.
CUstream_st* DefaultStream() {
  static auto* stream = new CUstream_st;
  return stream;
}

}  // namespace

void Count(int change) { open_count += change; }

bool Wished(const char* variable, int rank, int launch) {
  const char* wish = std::getenv(variable);
  int who = 0, when = 0;
  if (wish == nullptr) return false;
  if (std::sscanf(wish, "%d@%d", &who, &when) == 2) {
    return who == rank && when == launch;
  }
  return std::sscanf(wish, "%d@*", &who) == 1 && who == rank;
}

void Enqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream == nullptr) stream = DefaultStream();
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->queue.push_back(std::move(work));
  }
  stream->changed.notify_all();
}

}  // namespace fake

extern "C" {

int fake_gpu_open_count() { return fake::open_count; }

const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorMemoryAllocation ? "out of memory" : "an error";
}

cudaError_t cudaSetDevice(int device) {
  return device < 8 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  const bool shared = std::getenv("FAKE_GPU_SHARED") != nullptr;
  std::snprintf(text, bytes, "0000:%02d:00.0", shared ? 0 : device);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = 0;  // TensorFlow has it
  *total = size_t{1} << 34;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  *stream = new CUstream_st;
  fake::Count(1);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  fake::Count(-1);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  fake::Enqueue(stream, [&] {
    std::lock_guard<std::mutex> lock(mutex);
    over = true;
    changed.notify_all();
  });
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return over; });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned int) {
  fake::Enqueue(stream, [over = event->over] {
    while (!over->load()) usleep(20);
  });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = new CUevent_st{std::make_shared<std::atomic<bool>>(true)};
  fake::Count(1);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->over = std::make_shared<std::atomic<bool>>(false);
  fake::Enqueue(stream, [over = event->over] { over->store(true); });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->over->load() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  fake::Count(-1);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes,
                            cudaMemcpyKind, cudaStream_t stream) {
  fake::Enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes,
                            cudaStream_t stream) {
  fake::Enqueue(stream, [=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned int) {
  if (std::getenv("FAKE_GPU_NO_MEMORY")) return cudaErrorMemoryAllocation;
  *memory = std::malloc(bytes);
  fake::Count(1);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  fake::Count(-1);
  return cudaSuccess;
}

}  // extern "C"
