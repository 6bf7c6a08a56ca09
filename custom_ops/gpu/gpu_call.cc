// SPDX-License-Identifier: Apache-2.0
#if TFDIST_CUDA
#include "custom_ops/gpu/gpu_call.h"

#include <utility>

namespace tfdist {

using tensorflow::Tensor;

bool GpuCall::Prepare(tensorflow::OpKernelContext* context,
                      std::shared_ptr<Operation> of) {
  ctx = context;
  operation = std::move(of);
  if (operation == nullptr) return false;
  links = operation->group->gpu_links();
  if (links == nullptr) {
    ctx->SetStatus(absl::FailedPreconditionError(
        Message(operation->Name(), ": the process group was opened without a ",
                "GPU; run the op on the CPU")));
    return false;
  }
  over_nccl = links->over_nccl();
  theirs_ = StreamOf(ctx);
  return true;
}

void GpuCall::FollowTensorFlow() const {
  CudaEvent(theirs_).Precedes(links->stream());
}

std::shared_ptr<uint8_t> GpuCall::ToHost(const std::vector<Tensor>& tensors) {
  size_t bytes = 0;
  for (const Tensor& tensor : tensors) bytes += tensor.TotalBytes();
  std::shared_ptr<uint8_t> memory = links->Pinned(*operation, bytes);
  links->Guard(*operation, [&] {
    FollowTensorFlow();
    uint8_t* place = memory.get();
    for (const Tensor& tensor : tensors) {
      links->stream().Copy(place, tensor.data(), tensor.TotalBytes());
      place += tensor.TotalBytes();
    }
  });
  links->AwaitStream(*operation, "copy to the host");
  return memory;
}

void GpuCall::ToDevice(const uint8_t* data,
                       const std::vector<Tensor*>& tensors) {
  links->Guard(*operation, [&] {
    FollowTensorFlow();
    for (Tensor* tensor : tensors) {
      links->stream().Copy(tensor->data(), data, tensor->TotalBytes());
      data += tensor->TotalBytes();
    }
  });
  links->AwaitStream(*operation, "copy to the GPU");
}

void GpuCall::ExpectTurn() {
  if (operation->group->rank() != 0) turn_ = operation->Expect(0, kTurnPart);
}

void GpuCall::RunInTurn(const GpuLinks::Work& begin) {
  int64_t turn = 0;
  if (turn_ != nullptr) {
    operation->AwaitHeader(0, turn_, "await its turn");
    turn = turn_->header.rows;
  } else {
    turn = links->GiveTurn(operation->generation);
    Header header;
    header.part = kTurnPart;
    header.rows = turn;
    for (int step = 1; step < operation->group->world_size(); ++step) {
      operation->Send(operation->group->PeerAfter(step), header, nullptr);
    }
  }
  links->Run(*operation, turn,
             [&](NcclCommunicator& nccl, const CudaStream& stream) {
               FollowTensorFlow();
               begin(nccl, stream);
             });
  exchange->AwaitSent();
}

}  // namespace tfdist
#endif  // TFDIST_CUDA
