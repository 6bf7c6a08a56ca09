// SPDX-License-Identifier: Apache-2.0
#if TFDIST_CUDA
#include "custom_ops/gpu/gpu_links.h"

#include <utility>

#include "custom_ops/comm/process_group.h"
#include "custom_ops/common/message.h"

namespace tfdist {

GpuLinks::GpuLinks(int device, std::unique_ptr<NcclCommunicator> nccl)
    : device_((UseDevice(device), device)), nccl_(std::move(nccl)) {}

void GpuLinks::Renew(Turns& turns, uint32_t generation) {
  if (turns.generation < generation) turns = {generation, 0};
}

int64_t GpuLinks::GiveTurn(uint32_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  Renew(given_, generation);
  return given_.next++;
}

bool GpuLinks::IsTurn(uint32_t generation, int64_t turn) {
  std::lock_guard<std::mutex> lock(mutex_);
  Renew(begun_, generation);
  return begun_.generation > generation || begun_.next == turn;
}

void GpuLinks::EndTurn(uint32_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (begun_.generation == generation) ++begun_.next;
}

void GpuLinks::Run(Operation& operation, int64_t turn, const Work& begin) {
  operation.AwaitDevice([&] { return IsTurn(operation.generation, turn); },
                        "await its turn on the GPU");
  Guard(operation, [&] {
    const auto ready = [&] { return nccl_->Ready(); };
    nccl_->Connect();
    operation.AwaitDevice(ready, "connect over NCCL");
    begin(*nccl_, stream_);
    operation.AwaitDevice(ready, "begin over NCCL");
    const CudaEvent end(stream_.get());
    EndTurn(operation.generation);
    const auto over = [&] {
      const bool ended = end.Over();
      // An error of NCCL also ends the work on the stream.
      (void)nccl_->Ready();
      return ended;
    };
    operation.AwaitDevice(over, "exchange over NCCL");
  });
}

void GpuLinks::AwaitStream(Operation& operation, const char* stage) {
  Guard(operation, [&] {
    const CudaEvent end(stream_.get());
    operation.AwaitDevice([&] { return end.Over(); }, stage);
  });
}

std::shared_ptr<uint8_t> GpuLinks::Pinned(Operation& operation, size_t bytes) {
  std::shared_ptr<uint8_t> memory;
  Guard(operation, [&] { memory = pinned_.Acquire(bytes); });
  operation.Keep(memory);
  return memory;
}

// After a failure, the running work is aborted, because memory that a GPU still
// writes must not be released.
void GpuLinks::Guard(Operation& operation, const std::function<void()>& work) {
  const auto end = [&] {
    if (nccl_ != nullptr && operation.group->failed()) nccl_->Abort();
    stream_.Drain();
  };
  const auto fail = [&](const std::exception& error, const char* remedy) {
    operation.group->OnDeviceError(
        Message(operation.Name(), ": ", error.what(), ". ", remedy));
    end();
    throw OperationError(operation.group->FailureOf(operation), true);
  };
  try {
    work();
  } catch (const OperationError&) {
    end();
    throw;
  } catch (const NcclError& error) {
    fail(error,
         "Set NCCL_DEBUG=WARN for details from NCCL, or TFDIST_NCCL=0 to "
         "exchange "
         "through host memory");
  } catch (const CudaError& error) {
    fail(error, "Check the GPU with nvidia-smi");
  }
}

}  // namespace tfdist
#endif  // TFDIST_CUDA
