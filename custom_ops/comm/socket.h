// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_SOCKET_H_
#define TFDIST_CUSTOM_OPS_COMM_SOCKET_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace tfdist {

// The peer has closed the connection, or the connection is broken.
class ConnectionLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The peer has sent data that no peer of this build sends.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An owned file descriptor, closed by the destructor; -1 means none.
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
  // Makes the socket non-blocking, close-on-exec and without delay. A TCP
  // connection survives a network interruption of less than `timeout` seconds
  // and continues within two seconds after it; see LimitPause. Throws
  // std::system_error if `fd` is not a connected socket, or no longer.
  Socket(FileDescriptor fd, double timeout);

  int fd() const { return fd_.get(); }
  // Both return 0 if the call would block, and throw ConnectionLost.
  size_t Write(const iovec* parts, int count);
  size_t Read(const iovec* parts, int count);
  // Whether the peer's system has not yet acknowledged all written bytes.
  bool InFlight() const;
  // Limits the pause before the next retransmission where the system has no
  // option for that (Linux before 6.15). Must be called several times a second
  // while bytes are in flight, from one thread. Returns whether it must be
  // called again.
  bool LimitPause();

 private:
  void SetUserTimeout(int64_t nanoseconds);

  FileDescriptor fd_;
  int64_t user_timeout_;      // nanoseconds, as long as nothing is lost
  bool system_limits_pause_;  // see LimitPause
  bool user_timeout_changed_ = false;
  int64_t last_intact_;  // when no byte had to be retransmitted; see Now()
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_SOCKET_H_
