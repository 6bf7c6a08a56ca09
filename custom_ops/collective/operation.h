// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_OPERATION_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_OPERATION_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/collective/clock.h"
#include "custom_ops/collective/data_link.h"
#include "custom_ops/collective/inbox.h"
#include "custom_ops/collective/wire.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfdist {

class ProcessGroup;
struct Channel;

// Ends an operation with a status. `group_lost` says whether the group cannot
// go on.
class OperationError : public std::exception {
 public:
  OperationError(absl::Status status, bool group_lost)
      : status(std::move(status)), group_lost(group_lost) {}
  const char* what() const noexcept override { return "OperationError"; }

  const absl::Status status;
  const bool group_lost;
};

// One call of a collective on this rank, from post to done. Owns its messages
// and a reference to every tensor they point into.
class Operation : public Progress,
                  public std::enable_shared_from_this<Operation> {
 public:
  Operation(std::shared_ptr<ProcessGroup> group, Kind kind, int64_t tag,
            std::string label);

  // Sends a header and the payload that it tells the size of. Both throw
  // OperationError when the group fails.
  void Send(int peer, const Header& header, const void* payload);
  // The message `part` of this call from a peer, which may have come already.
  Incoming* Expect(int peer, uint32_t part);
  // Where its payload shall go; or that it stays where it comes to.
  void Give(int peer, Incoming* message, void* memory, uint64_t bytes);
  uint8_t* TakeEarly(int peer, Incoming* message);

  // Block; throw OperationError when the group fails, or a rank leaves, first.
  // `stage` must be a string literal.
  void AwaitHeader(int peer, Incoming* message, const char* stage);
  // Until all of them are here, by peer; or one that `ends` says ends it.
  void AwaitHeaders(const std::vector<std::pair<int, Incoming*>>& messages,
                    const std::function<bool(const Header&)>& ends,
                    const char* stage);
  bool HasHeader(int peer, const Incoming* message) const;
  // Whether a header comes until then, of the clock of Now(); what else ends it
  // throws likewise.
  bool AwaitHeaderUntil(int64_t end, int peer, Incoming* message);
  // Until so many bytes of the payload are there.
  void AwaitBytes(int peer, Incoming* message, uint64_t bytes,
                  const char* stage);
  void AwaitSent(const char* stage);
  // Looks again and again until it is over: nobody tells when a GPU is ready.
  // All ranks are in it: what is aborted meanwhile may still end for a moment,
  // and if it does not the group fails, as the ranks are not in step.
  void AwaitDevice(const std::function<bool()>& over, const char* stage);
  // Since when it waits for a GPU, and so for all ranks; of Now(), or 0.
  int64_t on_device_since() const { return on_device_since_; }
  // Waits end with `Stray` once any of these messages, which no rank sends that
  // does the same as this one, has a header.
  struct Stray {};
  void ExpectNone(std::vector<std::pair<int, Incoming*>> strays) {
    strays_ = std::move(strays);
  }

  // Keeps a tensor alive for as long as the messages.
  void Keep(const tensorflow::Tensor& tensor) { tensors_.push_back(tensor); }
  void Keep(std::shared_ptr<uint8_t> scratch) {
    scratch_.push_back(std::move(scratch));
  }

  // Lets messages and tensors go: nobody reads or writes them afterwards. Waits
  // for messages that have begun to leave, unless the group has failed, and for
  // all of an operation that is given up: peers that do not know want them.
  void Release();

  // Something has come or gone.
  void Advance() override;
  // Ends the wait of this operation, now and at its next one.
  void Abort();
  // Says that nobody here wants its result any more, of which the peers do not
  // know; and ends it for that reason.
  void Cancel();
  void GiveUp();
  bool cancelled() const { return cancelled_; }
  bool given_up() const;

  // "all_to_all 'layer emb/ids' (tag 2, stage receive header, rank 1)"
  std::string Describe() const;
  std::string Name() const;

  const std::shared_ptr<ProcessGroup> group;
  const Kind kind;
  const int64_t tag;
  const std::string label;
  const int64_t start;      // of the clock of Now()
  uint32_t generation = 0;  // of the group when the operation was asked for
  std::shared_ptr<Channel> channel;
  // In time that this process has run, guarded by the group's mutex: since the
  // rank that it waits for moved bytes, since it began, since it was cancelled.
  Unchanged moved;
  int64_t waited = 0;
  int64_t unwanted = 0;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  // The same by peer, before Release.
  std::vector<int64_t> SentTo() const;
  std::vector<int64_t> ReceivedFrom() const;

  int waiting_for() const;
  // Whether it waits for something of `peer` that has not come.
  bool WaitsFor(int peer) const;

 private:
  struct Received {
    int peer;
    Incoming* message;
  };
  struct Sent {
    int peer;
    Outgoing message;
  };
  // Until `missing` returns -1; else it returns the peer that is waited for.
  void Wait(const char* stage, const std::function<int()>& missing);
  // The same for ranks to come to the operation, which the group counts.
  void WaitForRanks(const char* stage, const std::function<int()>& missing);
  // With the mutex held: whether what is waited for is there.
  bool Over();
  void CountHeader(const Incoming* message);
  bool HasStray() const;

  mutable std::mutex mutex_;  // guards the next six
  std::condition_variable changed_;
  bool aborted_ = false;
  bool given_up_ = false;
  int peer_ = -1;
  const char* stage_ = "start";
  const std::function<int()>* missing_ = nullptr;  // of the wait

  std::atomic<bool> cancelled_{false};
  std::atomic<int64_t> on_device_since_{0};
  std::deque<Sent> sent_;  // messages do not move
  std::vector<Received> received_;
  std::vector<std::pair<int, Incoming*>> strays_;
  std::vector<tensorflow::Tensor> tensors_;
  std::vector<std::shared_ptr<uint8_t>> scratch_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_OPERATION_H_
