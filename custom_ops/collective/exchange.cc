// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/collective/exchange.h"

#include <cstring>

#include "custom_ops/collective/process_group.h"
#include "custom_ops/common/message.h"
#include "tensorflow/core/framework/types.h"

namespace tfdist {

namespace {

bool FitsFrame(uint64_t bytes, size_t capacity) {
  return bytes <= capacity - sizeof(Header);
}

std::string Describe(const Header& header) {
  const auto dtype = static_cast<tensorflow::DataType>(header.dtype);
  Header copy = header;
  std::string text = Message(KindName(header.kind), " '", GetText(copy.label),
                             "' (call ", header.call);
  if (header.dtype != 0) {
    text += ", " + (tensorflow::DataType_IsValid(dtype)
                        ? tensorflow::DataTypeString(dtype)
                        : Message("dtype ", header.dtype));
  }
  const bool by_row =
      header.kind == Kind::kAllToAll || header.kind == Kind::kAllGather;
  text += Message(", ", header.agreed, by_row ? " bytes per row" : " bytes");
  if (header.kind == Kind::kBroadcast) text += Message(", root ", header.root);
  return text + ")";
}

}  // namespace

Exchange::Exchange(Operation& operation, Header header)
    : operation_(operation),
      header_(header),
      headers_(operation.group->world_size()),
      sent_(operation.group->world_size()) {
  header_.kind = operation.kind;
  SetText(header_.label, operation.label.c_str());
}

void Exchange::SetError(const std::string& error) {
  // Short enough for any frame, so that nobody has to make room for it.
  error_ = error.substr(0, ProcessGroup::kInitialFrame / 2);
  header_.flags |= kErrorFlag;
}

void Exchange::Expect(int peer) {
  FrameBuffer& in = operation_.channel->peers[peer].in;
  if (!in.posted) {
    operation_.PostReceive(in.buffer.get(), peer, Stream::kFrame, 0,
                           in.capacity);
    in.posted = true;
  }
  expected_.push_back(peer);
}

void Exchange::ExpectAll() {
  for (int step = 1; step < operation_.group->world_size(); ++step) {
    Expect(operation_.group->PeerBefore(step));
  }
}

void Exchange::SendToAll(const void* data, size_t bytes) {
  for (int step = 1; step < operation_.group->world_size(); ++step) {
    Send(operation_.group->PeerAfter(step), data, bytes);
  }
}

void Exchange::Send(int peer, const void* data, size_t bytes) {
  if (!error_.empty()) {
    data = error_.data();
    bytes = error_.size();
  }
  FrameBuffer& out = operation_.channel->peers[peer].out;
  header_.bytes = bytes;
  header_.call = operation_.channel->calls;
  size_t frame = sizeof(Header);
  std::memcpy(out.memory.get(), &header_, sizeof(Header));
  const bool fits = FitsFrame(bytes, out.capacity);
  if (fits && bytes > 0) {
    std::memcpy(out.memory.get() + frame, data, bytes);
    frame += bytes;
  }
  sent_[peer] = bytes;
  sending_.push_back(peer);
  operation_.PostSend(out.buffer.get(), peer, Stream::kFrame, 0, frame);
  if (!fits) {
    rests_out_.push_back(
        {peer, operation_.Send(peer, Stream::kRest, data, bytes)});
  }
}

void Exchange::AwaitHeaders() {
  bool errors = !error_.empty();
  for (int peer : expected_) {
    FrameBuffer& in = operation_.channel->peers[peer].in;
    operation_.WaitReceive(in.buffer.get(), peer, "receive header");
    in.posted = false;
    std::memcpy(&headers_[peer], in.memory.get(), sizeof(Header));
    CheckHeader(peer);
    uint64_t bytes = sizeof(Header);
    if (InFrame(peer) != nullptr) bytes += headers_[peer].bytes;
    operation_.bytes_received += bytes;
    operation_.group->CountReceived(bytes);
    errors = errors || (headers_[peer].flags & kErrorFlag) != 0;
  }
  if (errors) ThrowErrors();
}

void Exchange::CheckHeader(int peer) {
  const Header& theirs = headers_[peer];
  header_.call = operation_.channel->calls;
  const bool lengths_agree = theirs.agreed == header_.agreed &&
                             theirs.shape_hash == header_.shape_hash;
  const bool excused = ((theirs.flags | header_.flags) & kErrorFlag) != 0;
  if (theirs.magic == kMagic && theirs.kind == header_.kind &&
      theirs.dtype == header_.dtype && theirs.root == header_.root &&
      theirs.call == header_.call && (lengths_agree || excused) &&
      std::strncmp(theirs.label, header_.label, sizeof(theirs.label)) == 0) {
    return;
  }
  ProcessGroup& group = *operation_.group;
  operation_.group->Fail(
      peer, absl::StatusCode::kInvalidArgument,
      Message("ranks disagree about the operation with tag ", operation_.tag,
              ": ", group.RankName(group.rank()), " runs ", Describe(header_),
              ", ", group.RankName(peer), " runs ", Describe(theirs)));
  throw OperationError(group.FailureOf(operation_), true);
}

// All messages are taken in first, so that the channel stays usable.
void Exchange::ThrowErrors() {
  std::string text = error_;
  if (!text.empty()) {
    text = Message("rank ", operation_.group->rank(), ": ", text);
  }
  for (int peer : expected_) {
    const Header& header = headers_[peer];
    const uint8_t* payload = InFrame(peer);
    if ((header.flags & kErrorFlag) != 0) {
      text += Message(
          text.empty() ? "" : "; ", "rank ", peer, ": ",
          std::string(reinterpret_cast<const char*>(payload), header.bytes));
    } else if (payload == nullptr) {
      std::shared_ptr<uint8_t> memory =
          operation_.group->scratch().Acquire(header.bytes);
      operation_.Keep(memory);
      ReceiveInto(peer, memory.get());
    }
  }
  AwaitPayloads();
  Finish();
  throw OperationError(
      absl::InvalidArgumentError(Message(operation_.Name(), ": ", text)),
      false);
}

const uint8_t* Exchange::InFrame(int peer) const {
  const FrameBuffer& in = operation_.channel->peers[peer].in;
  return FitsFrame(headers_[peer].bytes, in.capacity)
             ? in.memory.get() + sizeof(Header)
             : nullptr;
}

void Exchange::ReceiveInto(int peer, void* memory) {
  const uint64_t bytes = headers_[peer].bytes;
  if (const uint8_t* payload = InFrame(peer)) {
    if (bytes > 0) std::memcpy(memory, payload, bytes);
    return;
  }
  rests_in_.push_back(
      {peer, operation_.Receive(peer, Stream::kRest, memory, bytes)});
}

void Exchange::AwaitPayloads() {
  for (const Rest& rest : rests_in_) {
    operation_.WaitReceive(rest.buffer, rest.peer, "receive payload");
    operation_.bytes_received += headers_[rest.peer].bytes;
    operation_.group->CountReceived(headers_[rest.peer].bytes);
  }
  rests_in_.clear();
}

void Exchange::AwaitSent() {
  ProcessGroup& group = *operation_.group;
  for (int peer : sending_) {
    FrameBuffer& out = operation_.channel->peers[peer].out;
    operation_.WaitSend(out.buffer.get(), peer, "send header");
    const size_t capacity = group.NextCapacity(out.capacity, sent_[peer]);
    if (capacity != out.capacity) out.Resize(group.context(), capacity);
  }
  sending_.clear();
  for (const Rest& rest : rests_out_) {
    operation_.WaitSend(rest.buffer, rest.peer, "send payload");
  }
  rests_out_.clear();
}

void Exchange::Finish() {
  AwaitSent();
  ProcessGroup& group = *operation_.group;
  for (int peer : expected_) {
    FrameBuffer& in = operation_.channel->peers[peer].in;
    const size_t capacity =
        group.NextCapacity(in.capacity, headers_[peer].bytes);
    if (capacity != in.capacity) in.Resize(group.context(), capacity);
    operation_.PostReceive(in.buffer.get(), peer, Stream::kFrame, 0,
                           in.capacity);
    in.posted = true;
  }
  ++operation_.channel->calls;
}

}  // namespace tfdist
