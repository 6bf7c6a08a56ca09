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

// A connected stream socket, closed with the object.
class Socket {
 public:
  Socket() = default;
  // Owns `fd` from now on: non-blocking, closed on exec, without delay.
  // Throws std::system_error if it is no connected socket.
  explicit Socket(int fd);
  ~Socket() { Close(); }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int fd() const { return fd_; }
  // Both return 0 where the system cannot go on now, and throw ConnectionLost.
  size_t Write(const iovec* parts, int count);
  size_t Read(const iovec* parts, int count);
  void Close();

 private:
  int fd_ = -1;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_SOCKET_H_
