// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_OPERATION_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_OPERATION_H_

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/collective/channel.h"
#include "custom_ops/collective/wire.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfdist {

class ProcessGroup;

// Ends an operation with a status. `group_lost` says whether messages may be
// left half way, so that the group cannot go on.
class OperationError : public std::exception {
 public:
  OperationError(absl::Status status, bool group_lost)
      : status(std::move(status)), group_lost(group_lost) {}
  const char* what() const noexcept override { return "OperationError"; }

  const absl::Status status;
  const bool group_lost;
};

using Clock = std::chrono::steady_clock;

// One call of a collective on this rank, from post to done. Owns the Gloo
// buffers it posted and a reference to every tensor they point into: when the
// group fails they outlive the call, because a peer may still write.
class Operation {
 public:
  Operation(std::shared_ptr<ProcessGroup> group, Kind kind, int64_t tag,
            std::string label);

  // Posts `bytes` at `data` to or from a peer. The returned buffer can take
  // further posts of the same direction and peer.
  Buffer* Send(int peer, Stream stream, const void* data, size_t bytes);
  Buffer* Receive(int peer, Stream stream, void* data, size_t bytes);
  // Further posts on a buffer over [data, data + total).
  Buffer* MakeBuffer(void* data, size_t total);
  void PostSend(Buffer* buffer, int peer, Stream stream, size_t offset,
                size_t bytes);
  void PostReceive(Buffer* buffer, int peer, Stream stream, size_t offset,
                   size_t bytes);

  // Blocks until one post completes; throws OperationError when the group
  // fails first. `stage` must be a string literal.
  void WaitReceive(Buffer* buffer, int peer, const char* stage);
  void WaitSend(Buffer* buffer, int peer, const char* stage);

  // Keeps a tensor alive for as long as the buffers.
  void Keep(const tensorflow::Tensor& tensor) { tensors_.push_back(tensor); }
  void Keep(std::shared_ptr<uint8_t> scratch) {
    scratch_.push_back(std::move(scratch));
  }

  // Lets buffers and tensors go once nothing is posted any more, before the
  // consumers run: they may reuse a tensor that nobody else holds.
  void Release();

  // Wakes the thread that waits in this operation, now or at its next wait.
  void Abort();

  // "all_to_all 'layer emb/ids' (tag 2, stage receive from rank 1)"
  std::string Describe() const;
  std::string Name() const;

  const std::shared_ptr<ProcessGroup> group;
  const Kind kind;
  const int64_t tag;
  const std::string label;
  const Clock::time_point start;
  uint64_t generation = 0;  // of the group when the operation was asked for
  Channel* channel = nullptr;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;

  int waiting_for() const;

 private:
  void Wait(Buffer* buffer, bool receive, int peer, const char* stage);

  mutable std::mutex mutex_;  // guards the next four
  Buffer* current_ = nullptr;
  bool current_receives_ = false;
  int peer_ = -1;
  const char* stage_ = "start";

  std::vector<tensorflow::Tensor> tensors_;
  std::vector<std::shared_ptr<uint8_t>> scratch_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_OPERATION_H_
