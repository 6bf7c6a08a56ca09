// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_INBOX_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_INBOX_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "custom_ops/collective/scratch.h"
#include "custom_ops/collective/wire.h"

namespace tfdist {

// Who is told when something that it waits for has come or gone. Called from
// the thread of the connections, with no lock held.
class Progress {
 public:
  virtual ~Progress() = default;
  virtual void Advance() = 0;
};

// One message from a peer, from when it is expected or its header comes, to
// when its receiver takes it out.
struct Incoming {
  Header header;
  uint8_t* memory = nullptr;       // where the receiver wants the payload
  uint64_t wanted = 0;             // bytes that it has there
  std::shared_ptr<uint8_t> early;  // what came before it said so
  uint64_t early_bytes = 0;        // of it, those that count; see Inbox
  uint64_t received = 0;           // bytes of the payload
  bool header_here = false;
  bool busy = false;       // somebody writes to its memory
  bool abandoned = false;  // what is on its way is for nobody
  std::shared_ptr<Progress> receiver;

  bool complete() const { return header_here && received == header.bytes; }
};

// The messages of one peer that have come or are expected, by what they are of.
//
// A payload goes straight into the receiver's memory. Until the receiver knows
// where it wants it (it may need all headers first, or not have begun at all),
// it is kept in scratch memory, and what has come by then is copied over. No
// message ever waits for another one's receiver, so none can wait for ever. The
// payloads that are kept so may have `most_early` bytes in all.
class Inbox {
 public:
  Inbox(ScratchPool& scratch, uint64_t most_early)
      : scratch_(scratch), most_early_(most_early) {}

  // For receivers. `Expect` returns a message that may have come already;
  // it stays until `Remove`, which waits until nobody writes to its memory.
  Incoming* Expect(uint32_t generation, int64_t tag, uint64_t call,
                   uint32_t part, std::shared_ptr<Progress> receiver);
  void Remove(Incoming* message);
  bool HasHeader(const Incoming* message);
  // Bytes of the payload that are where they belong.
  uint64_t Received(const Incoming* message);
  // Where the payload shall go, once. A header that says another number of
  // bytes is an error of the peer: false if it is here, see Begin if it comes.
  bool Give(Incoming* message, void* memory, uint64_t bytes);
  // Takes the whole payload as it lies in scratch memory; once, in place of
  // Give. It may still be on its way.
  std::shared_ptr<uint8_t> TakeEarly(Incoming* message);
  // Forgets messages of generations before this one, also those to come.
  void Retire(uint32_t generation);

  // For the thread of the connections. `Begin` finds or makes the message of a
  // header; null for a second one of the same, or of another size than there is
  // memory for. Between `Claim`, which says where the next bytes go, and
  // `Advance` the memory stays as it is. Begin and Claim throw ProtocolError
  // where too many messages, or bytes, wait for receivers. Both must follow a
  // header that has bytes, if of none: its receiver may hear of it only then.
  Incoming* Begin(const Header& header);
  uint8_t* Claim(Incoming* message);
  void Advance(Incoming* message, uint64_t bytes);

 private:
  using Key = std::tuple<uint32_t, int64_t, uint64_t, uint32_t>;
  static Key KeyOf(const Header& header) {
    return {header.generation, header.tag, header.call, header.part};
  }
  uint8_t* EarlyMemory(Incoming* message);
  // With mutex_ held. The bytes of a payload that nobody has asked for count,
  // until somebody does or it is for nobody.
  void CountEarly(Incoming* message);
  void UncountEarly(Incoming* message);

  ScratchPool& scratch_;
  const uint64_t most_early_;
  uint64_t early_bytes_ = 0;  // that count, of all messages
  std::mutex mutex_;
  std::condition_variable idle_;
  std::map<Key, std::unique_ptr<Incoming>> messages_;
  uint32_t generation_ = 0;  // older messages are for nobody
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_INBOX_H_
