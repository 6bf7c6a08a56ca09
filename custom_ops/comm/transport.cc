// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/transport.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

#include "custom_ops/comm/clock.h"

namespace tfdist {

namespace {

constexpr uint64_t kWake = ~uint64_t{0};
constexpr int64_t kEndedConnectionWait = 1'000'000'000;
// Number of reads from a lost peer. This is more than the system buffers, and
// it limits the reads from a peer that continues to send.
constexpr int kLastTurns = 64;

int CheckFd(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return fd;
}

}  // namespace

uint64_t Transport::TagOf(int peer, Source source) {
  return static_cast<uint64_t>(peer) << 2 | static_cast<uint64_t>(source);
}

Transport::Transport(std::vector<Pair> sockets, double timeout,
                     ScratchPool& scratch, uint64_t most_early)
    : links_(sockets.size()),
      poller_(CheckFd(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(CheckFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  Watch(wake_.get(), kWake, EPOLLIN, true);
  for (size_t peer = 0; peer < sockets.size(); ++peer) {
    Pair& pair = sockets[peer];
    if (pair.data.get() < 0) continue;
    try {
      std::unique_ptr<SharedRings> rings;
      if (pair.shared.memory.get() >= 0) {
        rings = std::make_unique<SharedRings>(std::move(pair.shared));
      }
      links_[peer] =
          std::make_unique<Link>(Socket(std::move(pair.data), timeout),
                                 Socket(std::move(pair.control), timeout),
                                 std::move(rings), scratch, most_early);
    } catch (const std::system_error& error) {
      throw BadConnection(static_cast<int>(peer), error.what());
    }
  }
}

Transport::~Transport() { Stop(); }

void Transport::Start(TransportListener* listener) {
  listener_ = listener;
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
    Link* link = links_[peer].get();
    if (link == nullptr) continue;
    Watch(link->data.fd(), TagOf(peer, Source::kData), EPOLLIN, true);
    Watch(link->control.fd(), TagOf(peer, Source::kControl), EPOLLIN, true);
    const SharedRings* rings = link->data.rings();
    if (rings == nullptr) continue;
    // Edge-triggered: every byte on the bell is an event.
    Watch(rings->bell(), TagOf(peer, Source::kBell), EPOLLIN | EPOLLET, true);
    link->more = more_ = true;  // the peer may have written already
  }
  thread_ = std::thread(&Transport::Loop, this);
}

void Transport::Stop() {
  stopping_ = true;
  Wake();
  if (thread_.joinable()) thread_.join();
}

void Transport::CloseInChild() {
  for (const auto& link : links_) {
    if (link == nullptr) continue;
    close(link->data.fd());
    close(link->control.fd());
    if (link->data.rings() != nullptr) link->data.rings()->CloseInChild();
  }
  close(poller_.get());
  close(wake_.get());
}

void Transport::Send(int peer, Outgoing* message) {
  DataLink& link = links_[peer]->data;
  const bool left = link.Send(message);
  if (left && link.rings() == nullptr) {
    Watch(link.fd(), TagOf(peer, Source::kData), EPOLLIN | EPOLLOUT, false);
  }
}

bool Transport::Withdraw(int peer, Outgoing* message, bool broken) {
  return links_[peer]->data.Withdraw(message, broken);
}

void Transport::SendControl(int peer, const ControlFrame& frame) {
  ControlLink& link = links_[peer]->control;
  if (link.Send(frame)) {
    Watch(link.fd(), TagOf(peer, Source::kControl), EPOLLIN | EPOLLOUT, false);
  }
}

int64_t Transport::last_heard(int peer) const {
  return std::max(links_[peer]->control.last_heard(),
                  links_[peer]->data.last_moved());
}

bool Transport::InFlight() const {
  return std::any_of(links_.begin(), links_.end(), [](const auto& link) {
    return link != nullptr && link->data.InFlight();
  });
}

int64_t Transport::writes() const {
  int64_t writes = 0;
  for (const auto& link : links_) {
    if (link != nullptr) writes += link->data.writes();
  }
  return writes;
}

void Transport::Tick() {
  if (!ticking_.exchange(true)) Wake();
}

void Transport::Watch(int fd, uint64_t tag, uint32_t events, bool anew) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = tag;
  const int operation = anew ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  const int result = epoll_ctl(poller_.get(), operation, fd, &event);
  // EPOLL_CTL_MOD may fail, because a lost connection is not watched any more.
  if (anew) CheckFd(result, "epoll_ctl");
}

void Transport::Wake() {
  const uint64_t one = 1;
  // The counter is full, so the thread is awake.
  if (write(wake_.get(), &one, sizeof(one)) < 0) return;
}

void Transport::Loop() {
  constexpr int kMostEvents = 64;
  epoll_event events[kMostEvents];
  int64_t last_tick = Now();
  while (!stopping_) {
    const int wait = more_ ? 0 : ticking_ || ending_ ? kTickMilliseconds : -1;
    const int count = epoll_wait(poller_.get(), events, kMostEvents, wait);
    for (int i = 0; i < count; ++i) {
      const uint64_t tag = events[i].data.u64;
      if (tag == kWake) {
        uint64_t value;
        while (read(wake_.get(), &value, sizeof(value)) > 0) continue;
      } else {
        Serve(static_cast<int>(tag >> 2), static_cast<Source>(tag & 3),
              events[i].events);
      }
    }
    if (more_) ReadMore();
    if (ending_) DropEndedPeers();
    if (ticking_ && Now() - last_tick >= kTickMilliseconds * 1'000'000) {
      last_tick = Now();
      ticking_ = false;  // a call of Tick from now on wakes this thread
      const bool waits = listener_->OnTick();
      if (LimitPauses() || waits) ticking_ = true;
    }
  }
}

void Transport::Serve(int peer, Source source, uint32_t events) {
  Link& link = *links_[peer];
  if (link.lost) return;
  try {
    // Read first, because the data may contain the reason why the peer is gone.
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
      if (source == Source::kControl) {
        ReadControl(peer);
      } else {
        ReadData(peer, source);
      }
    }
    if (events & EPOLLOUT || source == Source::kBell) WriteMore(peer, source);
  } catch (const ConnectionLost&) {
    if (source == Source::kControl) return ReportLost(peer, "");
    epoll_ctl(poller_.get(), EPOLL_CTL_DEL, link.data.fd(), nullptr);
    link.data_ended = Now();
    ending_ = true;
  } catch (const std::bad_alloc&) {
    ReportLost(peer, "its message does not fit into the memory of this rank");
  } catch (const std::exception& error) {
    ReportLost(peer, error.what());
  }
}

void Transport::ReadData(int peer, Source source) {
  Link& link = *links_[peer];
  const SharedRings* rings = link.data.rings();
  if (source == Source::kData && rings != nullptr) return link.data.OnEnd();
  if (source == Source::kBell) rings->ClearBell();
  const bool more = link.data.OnReadable();
  // For a connection, the system reports remaining data again.
  if (more && source == Source::kBell) link.more = more_ = true;
}

void Transport::ReadMore() {
  more_ = false;
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
    Link* link = links_[peer].get();
    if (link == nullptr || !link->more) continue;
    link->more = false;
    Serve(peer, Source::kBell, EPOLLIN);
  }
}

void Transport::WriteMore(int peer, Source source) {
  Link& link = *links_[peer];
  if (source == Source::kBell) {
    link.data.OnWritable();  // the bell rings when there is space again
    return;
  }
  const bool control = source == Source::kControl;
  const int fd = control ? link.control.fd() : link.data.fd();
  // Stop watching for writability before the check. A thread that adds a
  // message in between starts watching again.
  Watch(fd, TagOf(peer, source), EPOLLIN, false);
  const bool left =
      control ? link.control.OnWritable() : link.data.OnWritable();
  if (left) Watch(fd, TagOf(peer, source), EPOLLIN | EPOLLOUT, false);
}

// Reports peers as lost whose connection for messages has ended, if their
// control connection gives no reason within kEndedConnectionWait.
void Transport::DropEndedPeers() {
  ending_ = false;
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
    Link* link = links_[peer].get();
    if (link == nullptr || link->lost || link->data_ended == 0) continue;
    if (Now() - link->data_ended > kEndedConnectionWait) {
      ReportLost(peer, "");
    } else {
      ending_ = true;
    }
  }
}

// Limits the pauses before retransmissions. Returns whether this must go on
// although no operation may wait here: a peer may wait for bytes in flight.
bool Transport::LimitPauses() {
  bool again = false;
  for (const auto& link : links_) {
    if (link == nullptr || link->lost) continue;
    const bool data = link->data.LimitPause();
    const bool control = link->control.LimitPause();
    again = again || data || control;
  }
  return again;
}

bool Transport::ReadControl(int peer) {
  return links_[peer]->control.OnReadable(
      [&](ControlFrame& frame) { listener_->OnControl(peer, frame); });
}

void Transport::ReportLost(int peer, const std::string& why) {
  Link& link = *links_[peer];
  link.lost = true;
  // One connection may end while the other still contains data that the peer
  // sent before its end.
  try {
    for (int i = 0; i < kLastTurns && link.data.OnReadable(); ++i) continue;
  } catch (const std::exception&) {  // the end of the connection
  }
  try {
    for (int i = 0; i < kLastTurns && ReadControl(peer); ++i) continue;
  } catch (const std::exception&) {
  }
  epoll_ctl(poller_.get(), EPOLL_CTL_DEL, link.data.fd(), nullptr);
  epoll_ctl(poller_.get(), EPOLL_CTL_DEL, link.control.fd(), nullptr);
  if (link.data.rings() != nullptr) {
    epoll_ctl(poller_.get(), EPOLL_CTL_DEL, link.data.rings()->bell(), nullptr);
  }
  listener_->OnLost(peer, why);
}

}  // namespace tfdist
