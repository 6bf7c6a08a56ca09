// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "custom_ops/comm/all_reduce_form.h"
#include "custom_ops/comm/channel.h"
#include "custom_ops/comm/clock.h"
#include "custom_ops/comm/process_group.h"
#include "custom_ops/common/message.h"
#include "tensorflow/core/framework/types.h"

namespace tfdist {

namespace {

constexpr size_t kMaxErrorBytes = 2000;
constexpr char kSameVersion[] =
    "Use the same version of tfdist_ext on all ranks";
// Flags that must be the same on all ranks.
constexpr uint16_t kFlags = kWeightedFlag | kDeviceFlag;
// After a mismatch, how long to wait for the headers of the other ranks.
constexpr int64_t kMismatchWait = 1'000'000'000;

// Whether each rank chooses how many rows it sends.
bool ByRow(Kind kind) {
  return kind == Kind::kAllToAll || kind == Kind::kAllGather;
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
  text += Message(", ", header.agreed,
                  ByRow(header.kind) ? " bytes per row" : " bytes");
  if (copy.shapes[0] != '\0') text += Message(", ", GetText(copy.shapes));
  if ((header.flags & kWeightedFlag) != 0) text += ", weighted";
  if ((header.flags & kDeviceFlag) != 0) text += ", between GPUs";
  if (header.kind == Kind::kBroadcast) text += Message(", root ", header.root);
  if (header.kind == Kind::kAllReduce && (header.flags & kDeviceFlag) == 0) {
    text += Message(", ", FormName(header.root));
  }
  return text + ")";
}

}  // namespace

Exchange::Exchange(Operation& operation, Header header)
    : operation_(operation),
      header_(header),
      messages_(operation.group->world_size()) {
  header_.kind = operation.kind;
  SetText(header_.label, operation.label.c_str());
}

void Exchange::SetError(const std::string& error) {
  ForwardError(Message("rank ", operation_.group->rank(), ": ", error));
}

void Exchange::ForwardError(const std::string& error) {
  error_ = error.substr(0, kMaxErrorBytes);
  header_.flags |= kErrorFlag;
}

void Exchange::Expect(int peer) {
  messages_[peer] = operation_.Expect(peer, header_.part);
  expected_.emplace_back(peer, messages_[peer]);
}

void Exchange::ExpectAll() {
  for (int step = 1; step < operation_.group->world_size(); ++step) {
    Expect(operation_.group->PeerBefore(step));
  }
}

void Exchange::ExpectNone() {
  ExpectAll();
  operation_.ExpectNone(expected_);
}

void Exchange::SendToAll(const void* data, size_t bytes) {
  for (int step = 1; step < operation_.group->world_size(); ++step) {
    Send(operation_.group->PeerAfter(step), data, bytes);
  }
}

void Exchange::Post(int peer, const void* data, size_t bytes, int64_t rows) {
  if (!error_.empty()) {
    data = error_.data();
    bytes = error_.size();
    rows = 0;
  }
  header_.bytes = bytes;
  header_.rows = rows;
  operation_.Send(peer, header_, data);
}

void Exchange::AwaitHeaders() {
  const std::string error = AwaitAgreement();
  if (!error.empty()) Throw(error);
}

void Exchange::Throw(const std::string& error) const {
  throw OperationError(
      absl::InvalidArgumentError(Message(operation_.Name(), ": ", error)),
      false);
}

std::string Exchange::AwaitAgreement() {
  operation_.AwaitHeaders(
      expected_, [&](const Header& theirs) { return !Agrees(header_, theirs); },
      "receive header");
  bool errors = !error_.empty();
  for (const auto& [peer, message] : expected_) {
    // The wait ended early, because another header differs.
    if (!operation_.HasHeader(peer, message)) continue;
    CheckHeader(peer);
    errors = errors || (message->header.flags & kErrorFlag) != 0;
  }
  return errors ? TakeErrors() : "";
}

bool Exchange::Agrees(const Header& one, const Header& other) const {
  const bool has_error = ((one.flags | other.flags) & kErrorFlag) != 0;
  const bool lengths_agree = one.agreed == other.agreed &&
                             one.shape_hash == other.shape_hash &&
                             ((one.flags ^ other.flags) & kFlags) == 0;
  const auto is_short = [](const Header& header) {
    return (header.flags & kErrorFlag) == 0 || header.bytes <= kMaxErrorBytes;
  };
  return one.kind == other.kind && one.dtype == other.dtype &&
         one.root == other.root && (lengths_agree || has_error) &&
         is_short(one) && is_short(other) &&
         std::strncmp(one.label, other.label, sizeof(one.label)) == 0;
}

void Exchange::CheckHeader(int peer) {
  if (!Agrees(header_, header(peer))) {
    if (header_.part != 0) throw Operation::Stray();
    Disagree();
  }
  if (((header_.flags | header(peer).flags) & kErrorFlag) == 0) {
    CheckBytes(peer);
  }
}

// All ranks must report the same reason, whichever rank detects it first. The
// reason is the first pair of ranks, in rank order, whose headers differ. So
// all available headers are compared.
void Exchange::Disagree() {
  ProcessGroup& group = *operation_.group;
  header_.call = operation_.channel->calls;
  std::vector<const Header*> headers(messages_.size());
  headers[group.rank()] = &header_;
  const int64_t end = Now() + kMismatchWait;
  for (const auto& [peer, message] : expected_) {
    if (operation_.AwaitHeaderUntil(end, peer, message)) {
      headers[peer] = &message->header;
    }
  }
  const auto differ = [&](int a, int b) {
    return headers[a] != nullptr && headers[b] != nullptr &&
           !Agrees(*headers[a], *headers[b]);
  };
  int first = 0, other = 1;
  while (!differ(first, other) && first + 2 < group.world_size()) {
    if (++other == group.world_size()) other = ++first + 1;
  }
  if (!differ(first, other)) {
    group.Fail(group.rank(), absl::StatusCode::kInternal,
               Message(operation_.Name(),
                       ": received an unexpected message, although all ranks "
                       "run this operation. ",
                       kSameVersion));
    throw OperationError(group.FailureOf(operation_), true);
  }
  group.Fail(other, absl::StatusCode::kInvalidArgument,
             Message("ranks disagree about the operation with tag ",
                     operation_.tag, ": ", group.RankName(first), " runs ",
                     Describe(*headers[first]), ", ", group.RankName(other),
                     " runs ", Describe(*headers[other])));
  throw OperationError(group.FailureOf(operation_), true);
}

void Exchange::CheckBytes(int peer) {
  const uint64_t bytes = header(peer).bytes;
  const int64_t rows = header(peer).rows;
  const uint64_t row = header_.agreed;
  const bool by_row = ByRow(header_.kind);
  const bool here = row != 0 && (header_.flags & kDeviceFlag) == 0;
  const bool rows_fit =
      rows >= 0 && static_cast<uint64_t>(rows) <= kMostBytes &&
      (here ? bytes % row == 0 && bytes / row == uint64_t(rows) : bytes == 0);
  if ((!by_row || rows_fit) && bytes == expected_bytes_.value_or(bytes)) return;
  ProcessGroup& group = *operation_.group;
  const std::string expected =
      !by_row ? Message(*expected_bytes_, " bytes")
      : here  ? Message("a number of rows, and ", row, " bytes for each")
              : Message("a number of rows, and no bytes: ",
                       row == 0 ? "the rows are empty"
                                 : "the rows themselves go between GPUs");
  group.Fail(
      peer, absl::StatusCode::kInternal,
      Message(group.RankName(peer), " sent ", bytes, " bytes",
              by_row ? Message(" and ", rows, " as the number of rows") : "",
              " for ", Describe(header(peer)), ", expected ", expected, ". ",
              kSameVersion));
  throw OperationError(group.FailureOf(operation_), true);
}

// Receives all messages before it returns the error, so that the ranks remain
// in step.
std::string Exchange::TakeErrors() {
  std::string text = error_;
  std::vector<const uint8_t*> payloads(messages_.size());
  for (const auto& [peer, _] : expected_) payloads[peer] = Receive(peer);
  AwaitPayloads();
  AwaitSent();
  for (const auto& [peer, message] : expected_) {
    if ((message->header.flags & kErrorFlag) == 0) continue;
    text += text.empty() ? "" : "; ";
    text.append(reinterpret_cast<const char*>(payloads[peer]),
                message->header.bytes);
  }
  return text;
}

void Exchange::ReceiveInto(int peer, void* memory) {
  if (header(peer).bytes == 0) return;
  operation_.Give(peer, messages_[peer], memory, header(peer).bytes);
  receiving_.push_back(peer);
}

uint8_t* Exchange::Receive(int peer) {
  receiving_.push_back(peer);
  return operation_.TakeEarly(peer, messages_[peer]);
}

void Exchange::AwaitPayloads() {
  for (int peer : receiving_) {
    AwaitBytes(peer, header(peer).bytes, "receive payload");
  }
  receiving_.clear();
}

void Exchange::AwaitBytes(int peer, uint64_t bytes, const char* stage) {
  operation_.AwaitBytes(peer, messages_[peer], bytes, stage);
}

}  // namespace tfdist
