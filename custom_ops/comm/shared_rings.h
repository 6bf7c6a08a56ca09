// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_SHARED_RINGS_H_
#define TFDIST_CUSTOM_OPS_COMM_SHARED_RINGS_H_

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "custom_ops/comm/socket.h"

namespace tfdist {

// Bytes to and from a peer on the same host, through shared memory: one ring
// buffer for each direction. Has the interface of Socket.
//
// No call waits. A reader that finds no bytes, or a writer that finds no space,
// sets a flag in the ring, checks again and returns. The other rank checks the
// flag after it has moved a counter. If the flag is set, it sends a byte to
// wake the first rank. This byte is sent over the bell, a pair of Unix sockets;
// each rank's transport thread watches one end. (A write to an eventfd blocks
// once the other process, which shares the eventfd's flags, has cleared
// O_NONBLOCK and filled it. Each call on a socket can be made non-blocking.)
// Only one thread at a time may read, and only one may write. What the peer
// writes into the memory is not trusted.
class SharedRings {
 public:
  struct Files {
    FileDescriptor memory;  // its size never changes (sealed)
    FileDescriptor bell;    // this rank's end of the bell
    bool first = false;     // true for the rank that writes the first ring
  };

  // Throws std::system_error if the files are not valid shared memory and a
  // bell.
  explicit SharedRings(Files files);
  ~SharedRings();
  SharedRings(const SharedRings&) = delete;
  SharedRings& operator=(const SharedRings&) = delete;

  // Both return the number of bytes moved. Read throws ProtocolError.
  size_t Write(const iovec* parts, int count);
  size_t Read(const iovec* parts, int count);

  int bell() const { return bell_.get(); }
  // Reads the bytes that the peer has sent to wake this rank. Must be called
  // before the rings are read, so that a full bell always has a reader that
  // will check the rings.
  void ClearBell() const;
  // Closes the copies in a forked process.
  void CloseInChild() const;

 private:
  // Counters of bytes since the start, each on a separate cache line.
  struct Ring {
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) std::atomic<uint32_t> reader_waits;
    alignas(64) std::atomic<uint32_t> writer_waits;
  };
  static_assert(sizeof(Ring) <= 4096 &&
                    std::atomic<uint64_t>::is_always_lock_free,
                "a page before the bytes");

  // Rings the peer's bell if the peer has set the flag `waits`.
  void Wake(std::atomic<uint32_t>& waits) const;
  uint8_t* Bytes(Ring* ring) const;

  FileDescriptor bell_;
  void* memory_ = nullptr;
  size_t size_ = 0;
  uint64_t capacity_ = 0;  // bytes of a ring, a power of two
  Ring* out_ = nullptr;
  Ring* in_ = nullptr;
  // This rank's own counters. The counters in the memory are for the peer to
  // read, and the peer might change them.
  uint64_t written_ = 0;
  uint64_t read_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_SHARED_RINGS_H_
