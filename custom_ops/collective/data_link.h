// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_DATA_LINK_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_DATA_LINK_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "custom_ops/collective/inbox.h"
#include "custom_ops/collective/shared_rings.h"
#include "custom_ops/collective/socket.h"
#include "custom_ops/collective/wire.h"

namespace tfdist {

// A message on its way out. The sender keeps payload and this until `sent`.
struct Outgoing {
  Header header;
  const uint8_t* payload = nullptr;
  uint64_t offset = 0;  // bytes of header and payload that have left
  std::atomic<bool> sent{false};
  std::shared_ptr<Progress> sender;

  uint64_t size() const { return sizeof(Header) + header.bytes; }
};

// The messages between this rank and one peer, over a connection of their own,
// or through memory if they share some: the connection then only tells when the
// peer ends.
//
// A message leaves on the caller's thread if nothing waits before it and the
// system takes it, and otherwise when the connection can be written to again.
// What waits leaves together, many messages in one call of the system: also
// what others hand over while one thread writes, which takes it along.
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
  // Null where there is no memory of both.
  const SharedRings* rings() const { return rings_.get(); }

  // Hands a message over; it may be sent already when this returns. Returns
  // whether something is left for OnWritable.
  bool Send(Outgoing* message);
  // Takes a message back unless it has begun to leave: then it must stay until
  // it is sent, and this returns false. `broken` takes it in any case, and
  // nothing leaves afterwards.
  bool TakeBack(Outgoing* message, bool broken);

  // For the thread of the connections; throw ConnectionLost, and ProtocolError
  // for what no peer of this build sends. OnReadable returns whether more may
  // have come than it took in one turn.
  bool OnReadable();
  bool OnWritable();  // whether more is left
  // Something has come over the connection beside the memory: its end.
  void OnEnd();

  bool InFlight() const { return socket_.InFlight(); }
  // Of the clock of Now(), when bytes moved last, in either direction.
  int64_t last_moved() const { return last_moved_.load(); }
  // How often messages left, some of them together.
  int64_t writes() const { return writes_.load(); }

 private:
  static constexpr size_t kStaged = size_t{64} << 10;
  // Bytes read at a time into a payload, and per turn of a connection.
  static constexpr size_t kRead = size_t{1} << 20;
  static constexpr size_t kTurn = size_t{4} << 20;

  size_t Write(const iovec* parts, int count);
  size_t Read(const iovec* parts, int count);
  // Lets go of the mutex while it writes. Returns whether something is left.
  bool WriteQueue(std::unique_lock<std::mutex>& lock);
  int Gather(iovec* parts);
  void Leave(size_t written);
  size_t ReadPayload();
  size_t ReadStaged();
  bool TakeHeader();
  void Moved();

  Socket socket_;
  const std::unique_ptr<SharedRings> rings_;
  Inbox inbox_;

  std::mutex mutex_;  // guards what is on its way out
  std::condition_variable written_;
  std::deque<Outgoing*> queue_;
  size_t leaving_ = 0;  // of the queue, with the thread that writes
  bool writing_ = false;
  bool room_ = true;  // as far as known
  bool broken_ = false;
  std::atomic<int64_t> writes_{0};

  // Of the thread of the connections.
  std::vector<uint8_t> staged_;
  size_t begin_ = 0, end_ = 0;  // of what is staged and not yet taken
  Incoming* current_ = nullptr;
  uint64_t left_ = 0;  // bytes of its payload to come
  std::atomic<int64_t> last_moved_{0};
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_DATA_LINK_H_
