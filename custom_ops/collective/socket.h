// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_SOCKET_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_SOCKET_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace tfdist {

// The peer has closed the connection, or it broke.
class ConnectionLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The peer sends what no peer of this build sends.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A file descriptor, closed with the object; -1 is none.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  ~FileDescriptor() { Close(); }
  FileDescriptor(FileDescriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int get() const { return fd_; }
  void Close();

 private:
  int fd_;
};

// A connected stream socket.
class Socket {
 public:
  // Makes it non-blocking, closed on exec, without delay. A connection over TCP
  // survives a cut that is shorter than `timeout` seconds, and goes on a second
  // after it. Throws std::system_error if it is not a connected socket (any
  // more).
  Socket(FileDescriptor fd, double timeout);

  int fd() const { return fd_.get(); }
  // Both return 0 where the system cannot go on now, and throw ConnectionLost.
  size_t Write(const iovec* parts, int count);
  size_t Read(const iovec* parts, int count);
  // Whether the peer's system has not got all that was written.
  bool InFlight() const;

 private:
  FileDescriptor fd_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_SOCKET_H_
