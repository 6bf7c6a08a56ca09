// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_CONTROL_LINK_H_
#define TFDIST_CUSTOM_OPS_COMM_CONTROL_LINK_H_

#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

#include "custom_ops/comm/socket.h"
#include "custom_ops/comm/wire.h"

namespace tfdist {

// Control frames between this rank and one peer, over a separate connection.
// Frames are copied into a queue and sent when the system accepts them.
class ControlLink {
 public:
  explicit ControlLink(Socket socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.fd(); }
  // Returns whether frames are left for OnWritable. Throws ConnectionLost, and
  // ProtocolError if the peer does not read its frames. The queue always has
  // space for an abort, because a group sends only one.
  bool Send(const ControlFrame& frame);

  // For the transport's thread; both throw ConnectionLost. `take` is called
  // with each frame that has arrived. OnReadable returns whether there may be
  // more frames than one call reads.
  bool OnReadable(const std::function<void(ControlFrame&)>& take);
  bool OnWritable();
  bool LimitPause() { return socket_.LimitPause(); }  // see Socket

  // When something arrived last; see Now().
  int64_t last_heard() const { return last_heard_.load(); }

 private:
  // Limit of queued frames. A peer that does not read its frames must not use
  // more memory.
  static constexpr size_t kMostWaiting = 4096;
  static constexpr int kTurn = 64;  // frames per call of OnReadable

  bool Write();

  Socket socket_;
  std::mutex mutex_;  // guards queue_ and offset_
  std::deque<ControlFrame> queue_;
  size_t offset_ = 0;  // bytes of the first frame that are sent

  ControlFrame frame_;  // the frame that is being received
  size_t received_ = 0;
  std::atomic<int64_t> last_heard_{0};
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_CONTROL_LINK_H_
