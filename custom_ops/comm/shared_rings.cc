// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/shared_rings.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace tfdist {

namespace {

constexpr size_t kPage = 4096;
// After this many bytes the counter moves, so that the peer can continue while
// more bytes are copied.
constexpr uint64_t kChunk = uint64_t{64} << 10;

std::system_error Error(const char* what) {
  return std::system_error(errno, std::generic_category(), what);
}

}  // namespace

SharedRings::SharedRings(Files files) : bell_(std::move(files.bell)) {
  const int memory = files.memory.get();
  struct stat found = {};
  const int seals = fcntl(memory, F_GET_SEALS);
  int domain = 0;
  socklen_t length = sizeof(domain);
  const bool ours =
      fstat(memory, &found) == 0 && seals >= 0 &&
      (seals & (F_SEAL_SHRINK | F_SEAL_SEAL)) ==
          (F_SEAL_SHRINK | F_SEAL_SEAL) &&
      getsockopt(bell(), SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 &&
      domain == AF_UNIX;
  size_ = static_cast<size_t>(found.st_size);
  capacity_ = size_ / 2 > kPage ? size_ / 2 - kPage : 0;
  if (!ours || capacity_ == 0 || (capacity_ & (capacity_ - 1)) != 0) {
    errno = EINVAL;
    throw Error("this file is not shared memory of two ranks");
  }
  memory_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  if (memory_ == MAP_FAILED) throw Error("cannot map shared memory");
  auto* first = static_cast<uint8_t*>(memory_);
  auto* rings = reinterpret_cast<Ring*>(first);
  auto* second = reinterpret_cast<Ring*>(first + size_ / 2);
  out_ = files.first ? rings : second;
  in_ = files.first ? second : rings;
}

SharedRings::~SharedRings() { munmap(memory_, size_); }

void SharedRings::CloseInChild() const { close(bell()); }

void SharedRings::ClearBell() const {
  char bytes[256];
  constexpr ssize_t kAll = sizeof(bytes);
  while (recv(bell(), bytes, sizeof(bytes), MSG_DONTWAIT) == kAll) continue;
}

uint8_t* SharedRings::Bytes(Ring* ring) const {
  return reinterpret_cast<uint8_t*>(ring) + kPage;
}

void SharedRings::Wake(std::atomic<uint32_t>& waits) const {
  if (waits.load(std::memory_order_seq_cst) != 0 && waits.exchange(0) != 0) {
    const char byte = 0;
    // If the bell is full, the peer is about to check it. If it is closed, the
    // peer is gone.
    (void)!send(bell(), &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
}

size_t SharedRings::Write(const iovec* parts, int count) {
  const uint64_t begin = written_;
  uint64_t published = written_;
  const auto publish = [&] {
    if (published == written_) return;
    out_->written.store(written_, std::memory_order_seq_cst);
    Wake(out_->reader_waits);
    published = written_;
  };
  const auto free_space = [&]() -> uint64_t {
    const uint64_t used = written_ - out_->read.load(std::memory_order_seq_cst);
    return used > capacity_ ? 0 : capacity_ - used;
  };
  for (int i = 0; i < count; ++i) {
    const auto* data = static_cast<const uint8_t*>(parts[i].iov_base);
    for (size_t left = parts[i].iov_len; left > 0;) {
      uint64_t free = free_space();
      if (free == 0) {
        publish();
        out_->writer_waits.store(1, std::memory_order_seq_cst);
        free = free_space();
        if (free == 0) return written_ - begin;
        out_->writer_waits.store(0, std::memory_order_relaxed);
      }
      const uint64_t place = written_ & (capacity_ - 1);
      const size_t size =
          std::min<uint64_t>({left, free, kChunk, capacity_ - place});
      std::memcpy(Bytes(out_) + place, data, size);
      written_ += size;
      data += size;
      left -= size;
      if (written_ - published >= kChunk) publish();
    }
  }
  publish();
  return written_ - begin;
}

size_t SharedRings::Read(const iovec* parts, int count) {
  const uint64_t begin = read_;
  const auto available = [&] {
    const uint64_t bytes = in_->written.load(std::memory_order_seq_cst) - read_;
    if (bytes > capacity_)
      throw ProtocolError("it wrote more bytes than the shared memory holds");
    return bytes;
  };
  for (int i = 0; i < count; ++i) {
    auto* data = static_cast<uint8_t*>(parts[i].iov_base);
    for (size_t left = parts[i].iov_len; left > 0;) {
      uint64_t unread = available();
      if (unread == 0) {
        if (read_ != begin) return read_ - begin;
        in_->reader_waits.store(1, std::memory_order_seq_cst);
        unread = available();
        if (unread == 0) return 0;
        in_->reader_waits.store(0, std::memory_order_relaxed);
      }
      const uint64_t place = read_ & (capacity_ - 1);
      const size_t size =
          std::min<uint64_t>({left, unread, kChunk, capacity_ - place});
      std::memcpy(data, Bytes(in_) + place, size);
      read_ += size;
      data += size;
      left -= size;
      in_->read.store(read_, std::memory_order_seq_cst);
      // Wakes a waiting writer only when half of the ring is free.
      if (unread - size <= capacity_ / 2) Wake(in_->writer_waits);
    }
  }
  return read_ - begin;
}

}  // namespace tfdist
