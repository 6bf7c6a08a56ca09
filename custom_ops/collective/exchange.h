// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_EXCHANGE_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_EXCHANGE_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/collective/operation.h"
#include "custom_ops/collective/wire.h"

namespace tfdist {

// One message to and from each peer, the core of every collective.
//
// A rank posts its messages, then awaits the headers, learns from them how much
// comes, says where it shall go, and awaits the payloads:
//
//   post:  ExpectAll(); for each peer: Send(peer, data, bytes)
//   body:  AwaitHeaders(); ReceiveInto(peer, memory)...; AwaitPayloads();
//          AwaitSent();
//
// Communication steps: one, of any size. Bytes on the wire: sizeof(Header) per
// message and the payload.
class Exchange {
 public:
  // `header` is what all ranks must agree on; its `bytes` is set per message,
  // its `part` says which messages of the operation these are.
  Exchange(Operation& operation, Header header);

  // A user error on this rank, known before the exchange: peers get it in place
  // of a payload, and the exchange ends with it on every rank. The text names
  // the ranks.
  void SetError(const std::string& error);
  // The same of an error that names its rank.
  void PassError(const std::string& error);
  const std::string& error() const { return error_; }

  // How many bytes every peer must send, where it is not for it to say.
  void SetExpectedBytes(uint64_t bytes) { expected_bytes_ = bytes; }

  // Those peers this rank shall hear, once each.
  void Expect(int peer);
  void ExpectAll();
  // No peer shall send any; waits of the operation end once one does.
  void ExpectNone();
  // Posts a message; `data` must stay until AwaitSent.
  void Send(int peer, const void* data, size_t bytes) {
    Post(peer, data, bytes, 0);
  }
  // The same of rows of `agreed` bytes.
  void SendRows(int peer, const void* data, int64_t rows) {
    Post(peer, data, rows * header_.agreed, rows);
  }
  void SendToAll(const void* data, size_t bytes);
  // No rows of these messages are in them: their number, for each peer.
  void SetRowsElsewhere() { header_.flags |= kDeviceFlag; }
  void AnnounceRows(int peer, int64_t rows) { Post(peer, nullptr, 0, rows); }

  // Awaits and checks the headers of all expected peers. Throws the error of
  // any rank that has one, after taking in all messages; and a Stray where a
  // part other than 0 differs, for the exchange of part 0 to Disagree.
  void AwaitHeaders();
  // The same, but returns the error; empty if there is none.
  std::string AwaitAgreement();
  [[noreturn]] void Throw(const std::string& error) const;
  // Ends the group with what the ranks do instead of the same; one differs.
  [[noreturn]] void Disagree();
  const Header& header(int peer) const { return messages_[peer]->header; }
  // Puts a payload into `memory`, of header(peer).bytes bytes.
  void ReceiveInto(int peer, void* memory);
  // The same into memory of its own, which may still be filled.
  uint8_t* Receive(int peer);
  void AwaitPayloads();
  // Awaits so many bytes of one payload.
  void AwaitBytes(int peer, uint64_t bytes, const char* stage);
  // Awaits that all has been sent: `data` may change from then on.
  void AwaitSent() { operation_.AwaitSent("send"); }

 private:
  void Post(int peer, const void* data, size_t bytes, int64_t rows);
  bool Agrees(const Header& one, const Header& other) const;
  void CheckHeader(int peer);
  void CheckBytes(int peer);
  std::string TakeErrors();

  Operation& operation_;
  Header header_;
  std::string error_;
  std::optional<uint64_t> expected_bytes_;
  std::vector<Incoming*> messages_;  // by peer, null where none is expected
  std::vector<std::pair<int, Incoming*>> expected_;
  std::vector<int> receiving_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_EXCHANGE_H_
