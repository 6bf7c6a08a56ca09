// SPDX-License-Identifier: Apache-2.0
#if TFDIST_CUDA
#include "custom_ops/gpu/nccl_communicator.h"

#include <cstring>

#include "custom_ops/common/half_float_bits.h"
#include "custom_ops/common/message.h"

namespace tfdist {

namespace {

constexpr int kSum = 0;
constexpr int kScalarOnHost = 1;

// A factor, rounded to the dtype that it multiplies, as NCCL requires.
struct Scalar {
  Scalar(float factor, NcclType type) {
    if (type == kNcclDouble) {
      const double wide = factor;
      std::memcpy(bytes, &wide, sizeof(wide));
    } else if (type == kNcclFloat) {
      std::memcpy(bytes, &factor, sizeof(factor));
    } else {
      const uint16_t narrow =
          type == kNcclHalf ? ToFloat16(factor) : ToBfloat16(factor);
      std::memcpy(bytes, &narrow, sizeof(narrow));
    }
  }
  char bytes[8] = {};
};

}  // namespace

std::string NcclCommunicator::NewId(const NcclLibrary& nccl) {
  NcclId id;
  const NcclResult result = nccl.GetUniqueId(&id);
  if (result != kNcclSuccess) {
    throw NcclError(Message("ncclGetUniqueId: ", nccl.GetErrorString(result)));
  }
  return {id.bytes, sizeof(id.bytes)};
}

NcclCommunicator::NcclCommunicator(const NcclLibrary& nccl, int rank,
                                   int world_size, const std::string& id)
    : nccl_(nccl), rank_(rank), world_size_(world_size) {
  if (id.size() != sizeof(id_.bytes)) {
    throw NcclError(Message("an NCCL id must have ", sizeof(id_.bytes),
                            " bytes, received ", id.size()));
  }
  std::memcpy(id_.bytes, id.data(), id.size());
}

void NcclCommunicator::Check(NcclResult result, const char* call) const {
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  const char* last = nccl_.GetLastError(comm_);
  throw NcclError(Message(call, ": ", nccl_.GetErrorString(result),
                          last != nullptr && *last != '\0' ? ", " : "",
                          last != nullptr ? last : ""));
}

ncclComm* NcclCommunicator::Open() const {
  if (comm_ == nullptr) throw NcclError("the NCCL communicator was aborted");
  return comm_;
}

// Runs calls as one NCCL group. The group belongs to the thread, so it must be
// ended even after an error.
void NcclCommunicator::Together(const std::function<void()>& calls) const {
  Check(nccl_.GroupStart(), "ncclGroupStart");
  try {
    calls();
  } catch (const NcclError&) {
    (void)nccl_.GroupEnd();
    throw;
  }
  Check(nccl_.GroupEnd(), "ncclGroupEnd");
}

void NcclCommunicator::Connect() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) (void)Open();
  if (comm_ != nullptr) return;
  NcclConfig config;
  Check(nccl_.CommInitRankConfig(&comm_, world_size_, id_, rank_, &config),
        "ncclCommInitRankConfig");
}

bool NcclCommunicator::Ready() {
  std::lock_guard<std::mutex> lock(mutex_);
  NcclResult state = kNcclSuccess;
  Check(nccl_.CommGetAsyncError(Open(), &state), "ncclCommGetAsyncError");
  Check(state, "NCCL");
  return state == kNcclSuccess;
}

void NcclCommunicator::Exchange(const std::vector<Sent>& sent,
                                const std::vector<Received>& received,
                                CUstream_st* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  ncclComm* comm = Open();
  Together([&] {
    for (const Sent& each : sent) {
      if (each.bytes == 0) continue;
      Check(
          nccl_.Send(each.data, each.bytes, kNcclInt8, each.peer, comm, stream),
          "ncclSend");
    }
    for (const Received& each : received) {
      if (each.bytes == 0) continue;
      Check(nccl_.Recv(each.memory, each.bytes, kNcclInt8, each.peer, comm,
                       stream),
            "ncclRecv");
    }
  });
}

void NcclCommunicator::AllReduce(const std::vector<Summed>& tensors,
                                 NcclType type, const float* factor,
                                 CUstream_st* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  ncclComm* comm = Open();
  int op = kSum;
  if (factor != nullptr) {
    Scalar scalar(*factor, type);
    Check(nccl_.RedOpCreatePreMulSum(&op, scalar.bytes, type, kScalarOnHost,
                                     comm),
          "ncclRedOpCreatePreMulSum");
  }
  Together([&] {
    for (const Summed& each : tensors) {
      if (each.count == 0) continue;
      Check(nccl_.AllReduce(each.input, each.output, each.count, type, op, comm,
                            stream),
            "ncclAllReduce");
    }
  });
  // NCCL has read the factor by now.
  if (factor != nullptr)
    Check(nccl_.RedOpDestroy(op, comm), "ncclRedOpDestroy");
}

void NcclCommunicator::Abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  if (comm_ != nullptr) (void)nccl_.CommAbort(comm_);
  comm_ = nullptr;
}

}  // namespace tfdist
#endif  // TFDIST_CUDA
