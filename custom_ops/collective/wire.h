// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_WIRE_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_WIRE_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

// What travels between two ranks. All ranks run the same build on machines of
// the same byte order; `magic` catches anything else.
//
// Two connections join a pair of ranks. One carries messages of collectives,
// each a Header and its payload; the other control frames, which therefore
// never queue behind payload. Nothing is asked for before it is sent: whoever
// is not ready for a message yet keeps it (see Inbox).

constexpr uint32_t kMagic = 0x74664435;  // "tfD5"
// More than any tensor: a longer payload is no message of ours.
constexpr uint64_t kMostBytes = uint64_t{1} << 44;

enum class Kind : uint16_t {
  kAllToAll = 1,
  kAllGather = 2,
  kAllReduce = 3,
  kBroadcast = 4,
  kBarrier = 5,
  kCheckPlan = 6,
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
  }
  return "unknown";
}

// The payload is the text of a user error on the sending rank, which every
// receiver raises as well.
constexpr uint16_t kErrorFlag = 1;
// The sender weighs its tensors.
constexpr uint16_t kWeightedFlag = 2;
// The rows travel between GPUs, not in messages.
constexpr uint16_t kDeviceFlag = 4;

struct Header {
  uint32_t magic = kMagic;
  Kind kind = Kind::kBarrier;
  uint16_t flags = 0;
  int64_t tag = 0;     // of the exchange
  uint64_t call = 0;   // how many calls this tag has had on the rank
  uint64_t bytes = 0;  // payload of this message
  int64_t rows = 0;    // in it, of an all_to_all or all_gather
  // Messages of another generation (see ProcessGroup::Leave) never match.
  uint32_t generation = 0;
  uint32_t part = 0;  // of the call: 0 is the first message
  int32_t dtype = 0;
  int32_t root = 0;         // of a broadcast; the form of an all_reduce
  uint64_t agreed = 0;      // must be equal on all ranks: row bytes, or total
  uint64_t shape_hash = 0;  // must be equal on all ranks
  double weight = 1;        // of this rank in a weighted all_reduce
  char label[72] = {};      // for the error of a mismatch
  char shapes[40] = {};     // likewise
};
static_assert(sizeof(Header) == 192, "the header is part of the protocol");

// The tag of the library itself; those of the `tag` attribute are below.
constexpr int64_t kPlanTag = int64_t{1} << 62;

enum class Control : uint32_t {
  kPing = 2,     // are you alive, and what are you waiting for?
  kPong = 3,     // `text` says it; `code` is 1 for a rank in no collective
  kAbort = 4,    // the group failed: `rank` is the culprit, `text` the reason
  kGoodbye = 5,  // this rank closes its group in good order; `text` says why if
                 // its program has failed
  kLeave = 6,    // this rank takes no further part in a generation: `rank` is
                 // whose failure made it leave, `text` the reason
  // The store of keys that rank 0 keeps. `text` holds key and value, each
  // terminated; `nonce` is the request's number.
  kInsert = 7,    // to rank 0: unless the key has a value, give it this one
  kInserted = 8,  // answer: `code` is 1 if the key has had a value
  kValue = 9,     // to all: the key has this value
};

struct ControlFrame {
  uint32_t magic = kMagic;
  Control type = Control::kPing;
  int32_t rank = -1;
  int32_t code = 0;    // absl::StatusCode of an abort; see kPong
  uint64_t nonce = 0;  // the generation in a leave, the ping's number else
  char text[1000] = {};
};
static_assert(sizeof(ControlFrame) == 1024, "part of the protocol");

// Copies `text`, cut to fit and terminated.
template <size_t N>
inline void SetText(char (&field)[N], const char* text) {
  size_t i = 0;
  for (; i + 1 < N && text[i] != '\0'; ++i) field[i] = text[i];
  field[i] = '\0';
}

// The text of a field that came from the network: never read past its end.
template <size_t N>
inline const char* GetText(char (&field)[N]) {
  field[N - 1] = '\0';
  return field;
}

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_WIRE_H_
