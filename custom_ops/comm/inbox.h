// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_INBOX_H_
#define TFDIST_CUSTOM_OPS_COMM_INBOX_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "custom_ops/comm/scratch.h"
#include "custom_ops/comm/wire.h"

namespace tfdist {

// Receives a notification when a message has arrived or is sent. Advance is
// called from the transport's thread, with no lock held.
class Progress {
 public:
  virtual ~Progress() = default;
  virtual void Advance() = 0;
};

// One message from a peer. It exists from the time when it is expected or its
// header arrives, until its receiver removes it.
struct Incoming {
  Header header;
  uint8_t* memory = nullptr;  // the receiver's memory for the payload
  uint64_t wanted = 0;        // size of this memory in bytes
  // Payload that came before `memory` was known.
  std::shared_ptr<uint8_t> early;
  uint64_t early_bytes = 0;  // bytes of it that count; see Inbox
  uint64_t received = 0;     // bytes of the payload that have arrived
  bool header_here = false;
  bool busy = false;       // a thread writes to its memory
  bool abandoned = false;  // no receiver will take this message
  std::shared_ptr<Progress> receiver;

  bool complete() const { return header_here && received == header.bytes; }
};

// The messages of one peer that have arrived or are expected, by generation,
// tag, call and part.
//
// A payload is received directly into the receiver's memory. The receiver may
// not know this memory yet, for example because it needs all headers first or
// has not started. Until then the payload is stored in scratch memory and is
// copied later. No message waits for the receiver of another message, so there
// is no deadlock. At most `most_early` bytes of such early payloads are stored.
class Inbox {
 public:
  Inbox(ScratchPool& scratch, uint64_t most_early)
      : scratch_(scratch), most_early_(most_early) {}

  // For receivers. `Expect` returns a message, which may have arrived already.
  // The message exists until `Remove`, which waits until no thread writes to
  // its memory.
  Incoming* Expect(uint32_t generation, int64_t tag, uint64_t call,
                   uint32_t part, std::shared_ptr<Progress> receiver);
  void Remove(Incoming* message);
  bool HasHeader(const Incoming* message);
  // Returns the number of payload bytes that are in their final memory.
  uint64_t Received(const Incoming* message);
  // Sets the memory for the payload; to be called once. A header with another
  // number of bytes is an error of the peer. Returns false if such a header has
  // arrived already; if it arrives later, Begin reports it.
  bool Give(Incoming* message, void* memory, uint64_t bytes);
  // Takes the entire payload in its scratch memory; to be called once, instead
  // of Give. The payload may still be incomplete.
  std::shared_ptr<uint8_t> TakeEarly(Incoming* message);
  // Discards messages of generations before `generation`, including those that
  // arrive later.
  void Retire(uint32_t generation);

  // For the transport's thread. `Begin` finds or creates the message of a
  // header. It returns null for a second header of the same message, and for a
  // size that differs from the receiver's memory. `Claim` returns the memory
  // for the next bytes; this memory remains valid until `Advance`. Begin and
  // Claim throw ProtocolError if too many messages, or bytes, have no receiver.
  // If the payload is not empty, the caller must call Claim and Advance after
  // Begin, even if it has no bytes of it yet: Begin may leave it to Advance to
  // notify the receiver.
  Incoming* Begin(const Header& header);
  uint8_t* Claim(Incoming* message);
  void Advance(Incoming* message, uint64_t bytes);

 private:
  using Key = std::tuple<uint32_t, int64_t, uint64_t, uint32_t>;
  static Key KeyOf(const Header& header) {
    return {header.generation, header.tag, header.call, header.part};
  }
  uint8_t* EarlyMemory(Incoming* message);
  // Require mutex_. The bytes of a payload count towards the limit until the
  // receiver calls Give or TakeEarly, or the message is discarded.
  void CountEarly(Incoming* message);
  void UncountEarly(Incoming* message);

  ScratchPool& scratch_;
  const uint64_t most_early_;
  uint64_t early_bytes_ = 0;  // sum of the early_bytes of all messages
  std::mutex mutex_;
  std::condition_variable idle_;
  std::map<Key, std::unique_ptr<Incoming>> messages_;
  uint32_t generation_ = 0;  // older messages are discarded
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_INBOX_H_
