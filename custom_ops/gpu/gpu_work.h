// SPDX-License-Identifier: Apache-2.0
//
// The GPU functions that an OpKernel uses. Ids that came over the network are
// checked on the GPU, when they are decoded. Sizes and hyperparameters are in
// host memory and are checked there, as on a CPU. So no other kernel has to
// wait for the GPU to detect an invalid input.
#ifndef TFDIST_CUSTOM_OPS_GPU_GPU_WORK_H_
#define TFDIST_CUSTOM_OPS_GPU_GPU_WORK_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <system_error>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/common/waiter_threads.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/stream_executor/stream.h"

namespace tfdist {

// Tests run these kernels under emulation on a CPU.
#if TFDIST_CUDA
const char* const kGpuDevice = tensorflow::DEVICE_GPU;
const char* const kGpuLabel = "";
#else
const char* const kGpuDevice = tensorflow::DEVICE_CPU;
const char* const kGpuLabel = "emulated";
#endif

// The GPU work of one call of an OpKernel, on TensorFlow's stream, with memory
// from TensorFlow's allocator.
class GpuWork {
 public:
  explicit GpuWork(tensorflow::OpKernelContext* ctx) : ctx_(ctx) {
    const auto* device = ctx->op_device_context();
    if (device == nullptr || device->stream() == nullptr) return;
    stream_ = device->stream()->platform_specific_handle().stream;
  }

  void* stream() const { return stream_; }

  // Converts the result of a launch to a status.
  absl::Status Launched(int error) const {
    if (error == cudaSuccess) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat(ctx_->op_kernel().name(), ": CUDA error ", error, ": ",
                     cudaGetErrorString(static_cast<cudaError_t>(error))));
  }

  // Allocates device memory for the life of this object. A later owner of the
  // memory uses it on the same stream, after the work launched here.
  template <typename T>
  absl::Status Allocate(int64_t count, T** memory) {
    return Take({}, count, memory);
  }

  // Allocates host memory that the GPU can access, for the life of this object.
  template <typename T>
  absl::Status AllocatePinned(int64_t count, T** memory) {
    tensorflow::AllocatorAttributes pinned;
    pinned.set_on_host(true);
    pinned.set_gpu_compatible(true);
    return Take(pinned, count, memory);
  }

  absl::Status Copy(const void* from, int64_t bytes, void* to) const {
    if (bytes == 0) return absl::OkStatus();
    return Launched(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault,
                                    static_cast<cudaStream_t>(stream_)));
  }

  // Ends an asynchronous kernel after all launched work has completed. Calls
  // `finish`, which must hold a reference to this object, on a separate thread,
  // so that no thread of TensorFlow waits.
  void WhenDone(WaiterThreads* waiters, std::function<absl::Status()> finish,
                tensorflow::AsyncOpKernel::DoneCallback done) {
    int device = 0;
    cudaEvent_t over = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx_, Launched(cudaGetDevice(&device)), done);
    OP_REQUIRES_OK_ASYNC(
        ctx_,
        Launched(cudaEventCreateWithFlags(
            &over, cudaEventDisableTiming | cudaEventBlockingSync)),
        done);
    absl::Status begun =
        Launched(cudaEventRecord(over, static_cast<cudaStream_t>(stream_)));
    const auto wait = [=] {
      absl::Status status = begun;
      status.Update(Launched(cudaSetDevice(device)));
      if (status.ok()) {
        status = Launched(cudaEventSynchronize(over));
      }
      cudaEventDestroy(over);
      if (status.ok()) status = finish();
      allocated_
          .clear();  // the device may be destroyed once the kernel has ended
      OP_REQUIRES_OK_ASYNC(ctx_, status, done);
      done();
    };
    try {
      waiters->Schedule(wait);
    } catch (const std::system_error&) {
      wait();
    }
  }

  // Keeps the most recently allocated memory until all launched work has
  // completed.
  absl::Status KeepLastUntilDone() {
    auto last = std::make_unique<tensorflow::Tensor>(allocated_.back());
    TF_RETURN_IF_ERROR(Launched(cudaLaunchHostFunc(
        static_cast<cudaStream_t>(stream_),
        [](void* tensor) { delete static_cast<tensorflow::Tensor*>(tensor); },
        last.get())));
    last.release();
    return absl::OkStatus();
  }

 private:
  template <typename T>
  absl::Status Take(tensorflow::AllocatorAttributes where, int64_t count,
                    T** memory) {
    tensorflow::Tensor tensor;
    const int64_t bytes = std::max<int64_t>(count * sizeof(T), 1);
    TF_RETURN_IF_ERROR(ctx_->allocate_temp(tensorflow::DT_UINT8,
                                           tensorflow::TensorShape({bytes}),
                                           &tensor, where));
    *memory = static_cast<T*>(tensor.data());
    allocated_.push_back(std::move(tensor));
    return absl::OkStatus();
  }

  tensorflow::OpKernelContext* ctx_;
  void* stream_ = nullptr;
  std::vector<tensorflow::Tensor> allocated_;
};

// Host arrays that are copied to the GPU in one transfer, from pinned memory.
class Upload {
 public:
  explicit Upload(GpuWork* work) : work_(work) {}

  // Adds an array, which must remain valid until Start(). Returns its number.
  template <typename T>
  size_t Add(const T* data, int64_t count) {
    arrays_.push_back({data, static_cast<size_t>(count) * sizeof(T), bytes_});
    bytes_ += (arrays_.back().bytes + kAlignment - 1) / kAlignment * kAlignment;
    return arrays_.size() - 1;
  }

  template <typename T>
  size_t Add(const std::vector<T>& data) {
    return Add(data.data(), data.size());
  }

  absl::Status Start() {
    char* pinned = nullptr;
    TF_RETURN_IF_ERROR(work_->Allocate(bytes_, &there_));
    TF_RETURN_IF_ERROR(work_->AllocatePinned(bytes_, &pinned));
    for (const Array& array : arrays_) {
      if (array.bytes == 0) continue;
      std::memcpy(pinned + array.at, array.data, array.bytes);
    }
    TF_RETURN_IF_ERROR(work_->Copy(pinned, bytes_, there_));
    return work_->KeepLastUntilDone();
  }

  // Returns the device address of an array.
  template <typename T>
  const T* At(size_t number) const {
    return reinterpret_cast<const T*>(there_ + arrays_[number].at);
  }

 private:
  static constexpr size_t kAlignment = 256;

  struct Array {
    const void* data;
    size_t bytes;
    size_t at;
  };

  GpuWork* work_;
  std::vector<Array> arrays_;
  size_t bytes_ = 0;
  char* there_ = nullptr;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_GPU_GPU_WORK_H_
