// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/collective/transport.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

#include "custom_ops/collective/clock.h"

namespace tfdist {

namespace {

constexpr uint64_t kWake = ~uint64_t{0};
constexpr int64_t kPatience = 1'000'000'000;

uint64_t TagOf(int peer, bool control) {
  return static_cast<uint64_t>(peer) << 1 | (control ? 1 : 0);
}

int CheckFd(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return fd;
}

}  // namespace

Transport::Transport(const std::vector<Pair>& sockets, ScratchPool& scratch) {
  // All are owned before anything can fail.
  std::vector<Socket> data(sockets.size()), control(sockets.size());
  for (size_t peer = 0; peer < sockets.size(); ++peer) {
    if (sockets[peer].data < 0 && sockets[peer].control < 0) continue;
    data[peer] = Socket(sockets[peer].data);
    control[peer] = Socket(sockets[peer].control);
  }
  poller_ = CheckFd(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  wake_ = CheckFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  Watch(wake_, kWake, EPOLLIN, true);
  links_.resize(sockets.size());
  for (size_t peer = 0; peer < sockets.size(); ++peer) {
    if (data[peer].fd() < 0) continue;
    links_[peer] = std::make_unique<Link>(std::move(data[peer]),
                                          std::move(control[peer]), scratch);
  }
}

Transport::~Transport() {
  Stop();
  close(wake_);
  close(poller_);
}

void Transport::Start(TransportListener* listener) {
  listener_ = listener;
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
    if (links_[peer] == nullptr) continue;
    Watch(links_[peer]->data.fd(), TagOf(peer, false), EPOLLIN, true);
    Watch(links_[peer]->control.fd(), TagOf(peer, true), EPOLLIN, true);
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
  }
  close(poller_);
  close(wake_);
}

void Transport::Send(int peer, Outgoing* message) {
  DataLink& link = links_[peer]->data;
  if (link.Send(message)) {
    Watch(link.fd(), TagOf(peer, false), EPOLLIN | EPOLLOUT, false);
  }
}

bool Transport::TakeBack(int peer, Outgoing* message, bool broken) {
  return links_[peer]->data.TakeBack(message, broken);
}

void Transport::SendControl(int peer, const ControlFrame& frame) {
  ControlLink& link = links_[peer]->control;
  if (link.Send(frame)) {
    Watch(link.fd(), TagOf(peer, true), EPOLLIN | EPOLLOUT, false);
  }
}

int64_t Transport::last_heard(int peer) const {
  return std::max(links_[peer]->control.last_heard(),
                  links_[peer]->data.last_moved());
}

void Transport::Tick(bool on) {
  if (!ticking_.exchange(on) && on) Wake();
}

void Transport::Watch(int fd, uint64_t tag, uint32_t events, bool anew) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = tag;
  // Of a connection that is lost meanwhile nothing is watched any more.
  epoll_ctl(poller_, anew ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event);
}

void Transport::Wake() {
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) < 0) return;  // it is awake
}

void Transport::Loop() {
  constexpr int kMostEvents = 64;
  epoll_event events[kMostEvents];
  int64_t last_tick = Now();
  while (!stopping_) {
    const int wait = ticking_ || ending_ ? kTickMilliseconds : -1;
    const int count = epoll_wait(poller_, events, kMostEvents, wait);
    for (int i = 0; i < count; ++i) {
      const uint64_t tag = events[i].data.u64;
      if (tag == kWake) {
        uint64_t value;
        while (read(wake_, &value, sizeof(value)) > 0) continue;
      } else {
        Serve(static_cast<int>(tag >> 1), (tag & 1) != 0, events[i].events);
      }
    }
    if (ending_) LoseWhoIsSilent();
    if (ticking_ && Now() - last_tick >= kTickMilliseconds * 1'000'000) {
      last_tick = Now();
      listener_->OnTick();
    }
  }
}

void Transport::Serve(int peer, bool control, uint32_t events) {
  Link& link = *links_[peer];
  if (link.lost) return;
  const int fd = control ? link.control.fd() : link.data.fd();
  try {
    // What has come first: it may say why the peer is gone.
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
      if (control) {
        ReadControl(peer);
      } else {
        link.data.OnReadable();
      }
    }
    if (events & EPOLLOUT) {
      // Watched for no more before looking: whoever adds something in between
      // watches again.
      Watch(fd, TagOf(peer, control), EPOLLIN, false);
      const bool left =
          control ? link.control.OnWritable() : link.data.OnWritable();
      if (left) Watch(fd, TagOf(peer, control), EPOLLIN | EPOLLOUT, false);
    }
  } catch (const ConnectionLost&) {
    if (control) return Lose(peer, "");
    epoll_ctl(poller_, EPOLL_CTL_DEL, fd, nullptr);
    link.data_ended = Now();
    ending_ = true;
  } catch (const std::bad_alloc&) {
    Lose(peer, "there is no memory for its message");
  } catch (const std::exception& error) {
    Lose(peer, error.what());
  }
}

// Those whose connection for messages has ended, while the other one has said
// nothing about it for a while.
void Transport::LoseWhoIsSilent() {
  ending_ = false;
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
    Link* link = links_[peer].get();
    if (link == nullptr || link->lost || link->data_ended == 0) continue;
    if (Now() - link->data_ended > kPatience) {
      Lose(peer, "");
    } else {
      ending_ = true;
    }
  }
}

void Transport::ReadControl(int peer) {
  links_[peer]->control.OnReadable(
      [&](ControlFrame& frame) { listener_->OnControl(peer, frame); });
}

void Transport::Lose(int peer, const std::string& why) {
  Link& link = *links_[peer];
  link.lost = true;
  // One connection may end while the other still holds what the peer said or
  // sent before it went.
  try {
    while (link.data.OnReadable()) continue;
  } catch (const std::exception&) {  // its end
  }
  try {
    ReadControl(peer);
  } catch (const std::exception&) {
  }
  epoll_ctl(poller_, EPOLL_CTL_DEL, link.data.fd(), nullptr);
  epoll_ctl(poller_, EPOLL_CTL_DEL, link.control.fd(), nullptr);
  listener_->OnLost(peer, why);
}

}  // namespace tfdist
