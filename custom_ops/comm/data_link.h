// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_DATA_LINK_H_
#define TFDIST_CUSTOM_OPS_COMM_DATA_LINK_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "custom_ops/comm/inbox.h"
#include "custom_ops/comm/shared_rings.h"
#include "custom_ops/comm/socket.h"
#include "custom_ops/comm/wire.h"

namespace tfdist {

// A message to send. The sender must not release the payload or this object
// before `sent` is true.
struct Outgoing {
  Header header;
  const uint8_t* payload = nullptr;
  uint64_t offset = 0;  // bytes of header and payload that are sent
  std::atomic<bool> sent{false};
  std::shared_ptr<Progress> sender;

  uint64_t size() const { return sizeof(Header) + header.bytes; }
};

// The messages between this rank and one peer, over a separate connection or
// through shared memory. With shared memory, the connection only reports the
// end of the peer.
//
// A message is sent on the caller's thread if the queue is empty and the system
// accepts it. Otherwise it is sent when the connection becomes writable. One
// system call sends many queued messages. The thread that writes also sends
// messages that other threads add to the queue meanwhile.
class DataLink {
 public:
  DataLink(Socket socket, std::unique_ptr<SharedRings> rings,
           ScratchPool& scratch, uint64_t most_early)
      : socket_(std::move(socket)),
        rings_(std::move(rings)),
        inbox_(scratch, most_early),
        staged_(rings_ == nullptr ? kStaged : sizeof(Header)) {}

  Inbox& inbox() { return inbox_; }
  int fd() const { return socket_.fd(); }
  // Null without shared memory.
  const SharedRings* rings() const { return rings_.get(); }

  // Sends a message or adds it to the queue. Returns whether something is left
  // for OnWritable. The message may already be sent when this returns.
  bool Send(Outgoing* message);
  // Removes a message from the queue. Returns false if a part of the message is
  // sent already: the message must then remain valid until it is sent. With
  // `broken`, removes it in any case, and nothing is sent afterwards.
  bool Withdraw(Outgoing* message, bool broken);

  // For the transport's thread. These functions throw ConnectionLost, and
  // ProtocolError for data that no peer of this build sends. OnReadable returns
  // whether there may be more data than one call reads.
  bool OnReadable();
  bool OnWritable();  // returns whether more is left
  // With shared memory: the connection has become readable, which means that it
  // has ended.
  void OnEnd();

  bool InFlight() const { return socket_.InFlight(); }
  // For the transport's thread; see Socket.
  bool LimitPause() { return socket_.LimitPause(); }
  // When bytes were last sent or received; see Now().
  int64_t last_moved() const { return last_moved_.load(); }
  // Number of writes. One write may send several messages.
  int64_t writes() const { return writes_.load(); }

 private:
  static constexpr size_t kStaged = size_t{64} << 10;
  // Bytes to read at a time into a payload, and bytes to read per call of
  // OnReadable.
  static constexpr size_t kRead = size_t{1} << 20;
  static constexpr size_t kTurn = size_t{4} << 20;

  size_t Write(const iovec* parts, int count);
  size_t Read(const iovec* parts, int count);
  // Releases the mutex while it writes. Returns whether something is left.
  bool WriteQueue(std::unique_lock<std::mutex>& lock);
  int Gather(iovec* parts);
  void PopSent(size_t written);
  size_t ReadPayload();
  size_t ReadStaged();
  bool TakeHeader();
  void Moved();

  Socket socket_;
  const std::unique_ptr<SharedRings> rings_;
  Inbox inbox_;

  std::mutex mutex_;  // guards the members up to broken_
  std::condition_variable written_;
  std::deque<Outgoing*> queue_;
  size_t in_write_ = 0;  // messages at the front that a thread is writing
  bool writing_ = false;
  bool accepts_bytes_ = true;  // false once the system accepts no more bytes
  bool broken_ = false;
  std::atomic<int64_t> writes_{0};

  // Used by the transport's thread only.
  std::vector<uint8_t> staged_;
  size_t begin_ = 0, end_ = 0;  // the part of staged_ that is not processed yet
  Incoming* current_ = nullptr;
  uint64_t left_ = 0;  // bytes of its payload that are still to come
  std::atomic<int64_t> last_moved_{0};
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_DATA_LINK_H_
