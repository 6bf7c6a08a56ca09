// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/socket.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "custom_ops/comm/clock.h"

namespace tfdist {

namespace {

// TCP_RTO_MAX_MS of Linux 6.15 and later. The build's headers may be older.
constexpr int kTcpRtoMaxMilliseconds = 44;

// Returns the nanoseconds after which a connection is broken if the peer
// acknowledges no data or answers no probe. This is later than the group's
// timeout, whose error names the silent rank, and at least a minute.
int64_t UserTimeout(double timeout) {
  return Nanoseconds(std::min(std::max(60.0, timeout + 30), 1e6));
}

// The longest pause between two retransmissions that LimitPause allows.
constexpr int64_t kLongestPause = 1'500'000'000;

void Check(int result, const char* what) {
  if (result < 0) {
    throw std::system_error(errno, std::generic_category(), what);
  }
}

// Returns whether the option is set. Some kinds of socket lack some options.
bool SetOption(int fd, int level, int name, int value) {
  return setsockopt(fd, level, name, &value, sizeof(value)) == 0;
}

bool MayTryAgain() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

}  // namespace

void FileDescriptor::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Socket::Socket(FileDescriptor descriptor, double timeout)
    : fd_(std::move(descriptor)),
      user_timeout_(UserTimeout(timeout)),
      last_intact_(Now()) {
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
  // These detect a peer whose host has died or is unreachable.
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, 20);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
  // While the network is interrupted, the system doubles the pause before each
  // retransmission. After an interruption of 8 s, it may wait 8 s more. This
  // option limits the pauses to a second; see LimitPause for older systems.
  system_limits_pause_ =
      SetOption(fd, IPPROTO_TCP, kTcpRtoMaxMilliseconds, 1000);
  SetOption(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1);
  // The shorter pauses would otherwise make the system give up earlier.
  SetUserTimeout(user_timeout_);
}

void Socket::SetUserTimeout(int64_t nanoseconds) {
  SetOption(fd(), IPPROTO_TCP, TCP_USER_TIMEOUT,
            static_cast<int>(nanoseconds / 1'000'000));
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

bool Socket::InFlight() const {
  int bytes = 0;
  return ioctl(fd(), SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

// When the system schedules a retransmission, it does so no later than the end
// of TCP_USER_TIMEOUT, and it counts that time from the first retransmission.
// This function keeps that end kLongestPause ahead of the present. If it were
// no longer called, the system would break the connection at that end.
bool Socket::LimitPause() {
  if (system_limits_pause_) return false;
  tcp_info info = {};
  socklen_t size = sizeof(info);
  if (getsockopt(fd(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  const int64_t now = Now();
  if (info.tcpi_retransmits == 0) {
    last_intact_ = now;
    if (user_timeout_changed_) SetUserTimeout(user_timeout_);
    user_timeout_changed_ = false;
    return InFlight();
  }
  // At least the time since the first retransmission.
  const int64_t interrupted = now - last_intact_;
  user_timeout_changed_ = true;
  SetUserTimeout(std::min(interrupted + kLongestPause, user_timeout_));
  return true;
}

}  // namespace tfdist
