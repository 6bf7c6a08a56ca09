// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/collective/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace tfdist {

namespace {

void Check(int result, const char* what) {
  if (result < 0) {
    throw std::system_error(errno, std::generic_category(), what);
  }
}

void SetOption(int fd, int level, int name, int value) {
  // Not every kind of socket has every option.
  setsockopt(fd, level, name, &value, sizeof(value));
}

bool MayTryAgain() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

}  // namespace

void FileDescriptor::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Socket::Socket(FileDescriptor descriptor) : fd_(std::move(descriptor)) {
  const int fd = fd_.get();
  sockaddr_storage peer;
  socklen_t size = sizeof(peer);
  Check(getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size),
        "the connection has ended");
  const int flags = fcntl(fd, F_GETFL);
  Check(flags, "no flags");
  Check(fcntl(fd, F_SETFL, flags | O_NONBLOCK), "cannot set O_NONBLOCK");
  Check(fcntl(fd, F_SETFD, FD_CLOEXEC), "cannot set FD_CLOEXEC");
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // A peer whose host died, or was cut off, is found out by these.
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, 20);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

size_t Socket::Write(const iovec* parts, int count) {
  msghdr message = {};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(count);
  const ssize_t written = sendmsg(fd(), &message, MSG_NOSIGNAL);
  if (written >= 0) return static_cast<size_t>(written);
  if (MayTryAgain()) return 0;
  throw ConnectionLost(std::strerror(errno));
}

size_t Socket::Read(const iovec* parts, int count) {
  const ssize_t size = readv(fd(), parts, count);
  if (size > 0) return static_cast<size_t>(size);
  if (size == 0) throw ConnectionLost("it closed the connection");
  if (MayTryAgain()) return 0;
  throw ConnectionLost(std::strerror(errno));
}
}  // namespace tfdist
