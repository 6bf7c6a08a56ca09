// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_EXCHANGE_H_
#define TFDIST_CUSTOM_OPS_COMM_EXCHANGE_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/comm/operation.h"
#include "custom_ops/comm/wire.h"

namespace tfdist {

// One message to and from each peer: the core of every collective.
//
// A rank first posts its messages. It then waits for the headers of its peers,
// which give the sizes of their payloads, chooses the memory for these
// payloads, and waits for them:
//
//   post:  ExpectAll(); for each peer: Send(peer, data, bytes)
//   body:  AwaitHeaders(); ReceiveInto(peer, memory)...; AwaitPayloads();
//          AwaitSent();
//
// Communication steps: one, for any size. Bytes on the wire: sizeof(Header) per
// message, and the payload.
class Exchange {
 public:
  // `header` holds the values that all ranks must agree on. Its `bytes` is set
  // for each message. Its `part` identifies the messages of this exchange among
  // those of the operation.
  Exchange(Operation& operation, Header header);

  // Sets a user error of this rank that is known before the exchange. Peers
  // receive the error in place of a payload, and the exchange ends with the
  // error on every rank. The text names the ranks that have the error.
  void SetError(const std::string& error);
  // Sets an error whose text already names its rank.
  void ForwardError(const std::string& error);
  const std::string& error() const { return error_; }

  // Sets the number of bytes that every peer must send, if the peers may not
  // choose it.
  void SetExpectedBytes(uint64_t bytes) { expected_bytes_ = bytes; }

  // Adds the peers that this rank receives from. Add each peer at most once.
  void Expect(int peer);
  void ExpectAll();
  // Declares that no peer may send a message of this part. Waits of the
  // operation end once a peer sends one.
  void ExpectNone();
  // Posts a message. `data` must remain valid and unchanged until AwaitSent
  // returns.
  void Send(int peer, const void* data, size_t bytes) {
    Post(peer, data, bytes, 0);
  }
  // Posts a message of `rows` rows of `agreed` bytes each.
  void SendRows(int peer, const void* data, int64_t rows) {
    Post(peer, data, rows * header_.agreed, rows);
  }
  void SendToAll(const void* data, size_t bytes);
  // Announces the number of rows to each peer, for rows that are sent outside
  // of these messages.
  void SetRowsOnDevice() { header_.flags |= kDeviceFlag; }
  void SendRowCount(int peer, int64_t rows) { Post(peer, nullptr, 0, rows); }

  // Waits for the headers of all expected peers and checks them. Throws the
  // error of any rank that has one, after all messages have arrived. If a
  // header of a part other than 0 differs, throws Stray: the exchange of part 0
  // then calls Disagree.
  void AwaitHeaders();
  // Like AwaitHeaders, but returns the error; empty if there is none.
  std::string AwaitAgreement();
  [[noreturn]] void Throw(const std::string& error) const;
  // Fails the group with an error that names two ranks whose headers differ,
  // and what each of them does. Requires that a header differs.
  [[noreturn]] void Disagree();
  const Header& header(int peer) const { return messages_[peer]->header; }
  // Receives the payload of `peer`, of header(peer).bytes bytes, into `memory`.
  void ReceiveInto(int peer, void* memory);
  // Receives the payload of `peer` into scratch memory and returns that memory.
  // The payload is complete only after AwaitPayloads.
  uint8_t* Receive(int peer);
  void AwaitPayloads();
  // Waits until `bytes` bytes of the payload of `peer` have arrived.
  void AwaitBytes(int peer, uint64_t bytes, const char* stage);
  // Waits until all messages are sent. `data` may change afterwards.
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
  std::vector<Incoming*> messages_;  // by peer; null where none is expected
  std::vector<std::pair<int, Incoming*>> expected_;
  std::vector<int> receiving_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_EXCHANGE_H_
