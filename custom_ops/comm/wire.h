// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_WIRE_H_
#define TFDIST_CUSTOM_OPS_COMM_WIRE_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// The protocol between two ranks. All ranks run the same build on machines of
// the same byte order; `magic` detects anything else.
//
// Each pair of ranks has two connections. One carries messages of collectives,
// each a Header and its payload. The other carries control frames, which
// therefore never wait behind a payload. A rank sends messages without a
// request. A rank that is not ready for a message stores it (see Inbox).

constexpr uint32_t kMagic = 0x74664435;  // "tfD5"
// Larger than any tensor. A header with a longer payload is invalid.
constexpr uint64_t kMostBytes = uint64_t{1} << 44;

enum class Kind : uint16_t {
  kAllToAll = 1,
  kAllGather = 2,
  kAllReduce = 3,
  kBroadcast = 4,
  kBarrier = 5,
  kCheckPlan = 6,
  kRequest = 7,
};

inline const char* KindName(Kind kind) {
  switch (kind) {
    case Kind::kAllToAll:
      return "all_to_all";
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kBarrier:
      return "barrier";
    case Kind::kCheckPlan:
      return "check_plan";
    case Kind::kRequest:
      return "request";
  }
  return "unknown";
}

// The payload is the text of a user error on the sending rank. Every receiver
// raises this error too.
constexpr uint16_t kErrorFlag = 1;
// The sender sums its tensors with a weight.
constexpr uint16_t kWeightedFlag = 2;
// The rows are sent between GPUs, not in messages.
constexpr uint16_t kDeviceFlag = 4;

struct Header {
  uint32_t magic = kMagic;
  Kind kind = Kind::kBarrier;
  uint16_t flags = 0;
  int64_t tag = 0;     // of the exchange
  uint64_t call = 0;   // number of calls of this tag on the rank
  uint64_t bytes = 0;  // of the payload of this message
  // Rows in the payload, for all_to_all and all_gather; the step of a request.
  int64_t rows = 0;
  // Messages of another generation never match; see ProcessGroup::Leave.
  uint32_t generation = 0;
  uint32_t part = 0;  // of the call; 0 is the first message
  int32_t dtype = 0;
  int32_t root = 0;  // root of a broadcast, or form of an all_reduce
  // Must be equal on all ranks: bytes of a row, or in total.
  uint64_t agreed = 0;
  uint64_t shape_hash = 0;  // must be equal on all ranks
  double weight = 1;        // of this rank in a weighted all_reduce
  char label[72] = {};      // for the error of a mismatch
  char shapes[40] = {};     // for the error of a mismatch
};
static_assert(sizeof(Header) == 192, "the header is part of the protocol");

// The tag of the library's own exchange. Values of the `tag` attribute are
// smaller.
constexpr int64_t kPlanTag = int64_t{1} << 62;

enum class Control : uint32_t {
  kPing = 2,  // asks whether the peer is alive and what it waits for
  // Answers a ping in `text`; `code` is 1 for a rank in no collective.
  kPong = 3,
  kAbort = 4,  // the group failed: `rank` is the culprit, `text` the reason
  // The rank closes its group in good order; `text` is the error of its
  // program, if any.
  kGoodbye = 5,
  // The rank leaves a generation: `rank` is the rank that failed, `text` the
  // reason.
  kLeave = 6,
  // The key-value store on rank 0. `text` holds key and value, each terminated
  // by a zero byte. `nonce` is the number of the request.
  kInsert = 7,    // to rank 0: set this value unless the key has a value
  kInserted = 8,  // answer: `code` is 1 if the key had a value
  kValue = 9,     // to all ranks: the key has this value
};

struct ControlFrame {
  uint32_t magic = kMagic;
  Control type = Control::kPing;
  int32_t rank = -1;
  int32_t code = 0;  // absl::StatusCode of an abort; see kPong
  // Generation of a leave; otherwise the number of the ping.
  uint64_t nonce = 0;
  char text[1000] = {};
};
static_assert(sizeof(ControlFrame) == 1024, "part of the protocol");

// Copies `text`, truncated if necessary, with a terminating zero byte.
template <size_t N>
inline void SetText(char (&field)[N], const char* text) {
  size_t i = 0;
  for (; i + 1 < N && text[i] != '\0'; ++i) field[i] = text[i];
  field[i] = '\0';
}

// Returns the text of a field that came from the network. Terminates it, so
// that it is never read past its end.
template <size_t N>
inline const char* GetText(char (&field)[N]) {
  field[N - 1] = '\0';
  return field;
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_WIRE_H_
