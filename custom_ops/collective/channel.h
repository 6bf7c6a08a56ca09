// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_CHANNEL_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_CHANNEL_H_

#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace tfdist {

using Buffer = gloo::transport::UnboundBuffer;

// One direction between this rank and a peer for one tag: memory for a frame
// and the Gloo buffer on it. Both ends start with the same capacity and grow it
// by the same rule from the messages they have seen, so a frame always fits
// into the receive that was posted for it.
struct FrameBuffer {
  std::unique_ptr<uint8_t[]> memory;
  std::unique_ptr<Buffer> buffer;
  size_t capacity = 0;
  bool posted = false;  // a receive waits for the next frame

  void Resize(gloo::transport::Context& context, size_t bytes) {
    buffer.reset();  // before its memory
    memory.reset(new uint8_t[bytes]);
    buffer = context.createUnboundBuffer(memory.get(), bytes);
    capacity = bytes;
    posted = false;
  }
};

// The state of one tag on this rank. Operations of one tag run one after
// another; `waiting` holds those that came while one was running.
struct Channel {
  struct Peer {
    FrameBuffer in;
    FrameBuffer out;
  };
  int64_t tag = 0;
  uint64_t calls = 0;
  std::vector<Peer> peers;
  bool busy = false;
  std::deque<std::function<void()>> waiting;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_CHANNEL_H_
