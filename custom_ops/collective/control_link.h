// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_CONTROL_LINK_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_CONTROL_LINK_H_

#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

#include "custom_ops/collective/socket.h"
#include "custom_ops/collective/wire.h"

namespace tfdist {

// Control frames between this rank and one peer, over a connection of their
// own. Frames are copied, and leave as the system takes them.
class ControlLink {
 public:
  explicit ControlLink(Socket socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.fd(); }
  // Returns whether something is left for OnWritable. Throws ConnectionLost,
  // and ProtocolError for a peer that does not read. An abort, of which a group
  // sends one, always finds room.
  bool Send(const ControlFrame& frame);

  // For the thread of the connections; both throw ConnectionLost. `take` gets
  // the frames that have come; returns whether there may be more than it took
  // in one turn.
  bool OnReadable(const std::function<void(ControlFrame&)>& take);
  bool OnWritable();

  // Of the clock of Now(), when something came last.
  int64_t last_heard() const { return last_heard_.load(); }

 private:
  // A peer that does not read its control frames any more is worth no memory.
  static constexpr size_t kMostWaiting = 4096;
  static constexpr int kTurn = 64;  // frames

  bool Write();

  Socket socket_;
  std::mutex mutex_;  // guards what is on its way out
  std::deque<ControlFrame> queue_;
  size_t offset_ = 0;  // of the first

  ControlFrame frame_;  // on its way in
  size_t received_ = 0;
  std::atomic<int64_t> last_heard_{0};
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_CONTROL_LINK_H_
