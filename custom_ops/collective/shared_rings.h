// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_SHARED_RINGS_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_SHARED_RINGS_H_

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "custom_ops/collective/socket.h"

namespace tfdist {

// Bytes to and from a peer on the same host, through memory of both: a ring of
// bytes for each direction. Has the interface of Socket.
//
// Nobody waits here. Whoever finds nothing to read, or no room to write, leaves
// a note of it in the ring, looks again and returns; the other one, who looks
// for notes after it has moved a counter, then sends a byte to wake it: each
// has one end of a pair of Unix sockets, the bell, that its transport's thread
// watches. (A write to an eventfd blocks once the other process, which shares
// its flags, has cleared O_NONBLOCK and filled it. A socket can be told at each
// call not to block.) Only one thread at a time may read, and one write. What
// the peer writes into the memory is not trusted.
class SharedRings {
 public:
  struct Files {
    FileDescriptor memory;  // of a size that never changes (sealed)
    FileDescriptor bell;    // this rank's end
    bool first = false;     // of the two ranks: writes the first ring
  };

  // Throws std::system_error if the files are not what ranks share.
  explicit SharedRings(Files files);
  ~SharedRings();
  SharedRings(const SharedRings&) = delete;
  SharedRings& operator=(const SharedRings&) = delete;

  // Both return how many bytes they have moved; Read throws ProtocolError.
  size_t Write(const iovec* parts, int count);
  size_t Read(const iovec* parts, int count);

  int bell() const { return bell_.get(); }
  // Takes what the peer has sent to wake this rank; to be called before looking
  // into the rings, so that the bell cannot be full with nobody coming to look.
  void ClearBell() const;
  // In a forked process.
  void CloseInChild() const;

 private:
  // Counters of bytes since the start, each on a line of the cache of its own.
  struct Ring {
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) std::atomic<uint32_t> reader_waits;
    alignas(64) std::atomic<uint32_t> writer_waits;
  };
  static_assert(sizeof(Ring) <= 4096 &&
                    std::atomic<uint64_t>::is_always_lock_free,
                "a page before the bytes");

  // Rings the peer's bell if it has left a note.
  void Wake(std::atomic<uint32_t>& waits) const;
  uint8_t* Bytes(Ring* ring) const;

  FileDescriptor bell_;
  void* memory_ = nullptr;
  size_t size_ = 0;
  uint64_t capacity_ = 0;  // of a ring, a power of two
  Ring* out_ = nullptr;
  Ring* in_ = nullptr;
  // This rank's own counters: those in the memory are for the peer to see.
  uint64_t written_ = 0;
  uint64_t read_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_SHARED_RINGS_H_
