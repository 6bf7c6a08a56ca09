// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_EXCHANGE_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_EXCHANGE_H_

#include <string>
#include <vector>

#include "custom_ops/collective/channel.h"
#include "custom_ops/collective/operation.h"
#include "custom_ops/collective/wire.h"

namespace tfdist {

// One message to and from each peer, the core of every collective.
//
// A rank posts its messages, then awaits the headers, learns from them how much
// comes, says where it shall go, and awaits the payloads:
//
//   post:  for each peer: Send(peer, data, bytes)
//   body:  AwaitHeaders(); ReceiveInto(peer, memory)...; AwaitPayloads();
//          Finish();
//
// Communication steps: one when payloads fit into frames, else three one-way
// trips (frame, "ready to receive", rest). Bytes on the wire: 128 per message
// and the payload.
class Exchange {
 public:
  // `header` is what all ranks must agree on; its `bytes` is set per message.
  Exchange(Operation& operation, Header header);

  // A user error on this rank, known before the exchange: peers get it in place
  // of a payload, and the exchange ends with it on every rank.
  void SetError(const std::string& error);

  // Posts the receives from those peers this rank shall hear, once.
  void Expect(int peer);
  void ExpectAll();
  // Posts a message; `data` must stay until Finish.
  void Send(int peer, const void* data, size_t bytes);
  void SendToAll(const void* data, size_t bytes);

  // Awaits and checks the headers of all expected peers. Throws the error of
  // any rank that has one, after taking in all messages.
  void AwaitHeaders();
  const Header& header(int peer) const { return headers_[peer]; }
  // The payload in the frame, valid until Finish; null if it comes as a rest.
  const uint8_t* InFrame(int peer) const;
  // Puts a payload into `memory`, of header(peer).bytes bytes.
  void ReceiveInto(int peer, void* memory);
  void AwaitPayloads();
  // Awaits that all has been sent: `data` may change from then on.
  void AwaitSent();
  // Awaits that all has been sent, and readies the channel for its next use.
  void Finish();

 private:
  struct Rest {
    int peer;
    Buffer* buffer;
  };
  void CheckHeader(int peer);
  void ThrowErrors();

  Operation& operation_;
  Header header_;
  std::string error_;
  std::vector<Header> headers_;  // of the peers
  std::vector<uint64_t> sent_;   // payload bytes by peer
  std::vector<int> expected_;
  std::vector<int> sending_;
  std::vector<Rest> rests_in_;
  std::vector<Rest> rests_out_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_EXCHANGE_H_
