// SPDX-License-Identifier: Apache-2.0
// NCCL's functions that are used, for ranks that are threads or processes of
// one host, over Unix sockets. It is as strict as NCCL is allowed to be: what
// is begun is first reported as in progress and reaches the stream only when
// that was asked for; sums want the same of all ranks.
//
// Environment, as rank@launch:
//   FAKE_NCCL_ERROR: fails there, as a card or a cable does.
//   FAKE_NCCL_HANG: never does its part, and does not say so.
//   FAKE_NCCL_DIE: the process is gone.
//   FAKE_NCCL_ABSENT: the rank (@0) never comes to connect.
// FAKE_NCCL_VERSION: another one than 2.27.7.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "custom_ops/common/half_float_bits.h"
#include "tests/fake_gpu/fake.h"

namespace {

enum { kSuccess = 0, kSystemError = 2, kInvalidUsage = 5, kRemoteError = 6 };
enum { kInProgress = 7 };
enum { kInt8 = 0, kHalf = 6, kFloat = 7, kDouble = 8, kBfloat16 = 9 };
constexpr int kFirstOwnOp = 100;

struct Ended {};  // by an abort, or an error that was noted

// What a rank sends before its bytes, so that a receiver sees a mismatch.
struct Announced {
  uint64_t bytes;
  int64_t what;  // 0 for rows, else dtype and number of a sum
};

struct Comm {
  int rank = 0;
  int ranks = 0;
  std::string id;
  std::vector<int> sockets;
  std::vector<double> factors;
  int launches = 0;
  std::mutex mutex;  // guards the next three
  int state = kInProgress;
  std::string last_error;
  std::vector<std::pair<cudaStream_t, std::function<void()>>> begun;
  std::atomic<bool> aborted{false};
  std::thread connecting;

  ~Comm() {
    for (int socket : sockets) {
      if (socket >= 0) close(socket);
    }
    fake::Count(-1);
  }

  [[noreturn]] void Note(int error, const std::string& text) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      state = error;
      last_error = text;
    }
    Hang();
  }
  // As a kernel that waits for a peer: until it is aborted.
  [[noreturn]] void Hang() {
    while (!aborted) usleep(200);
    throw Ended();
  }

  void Address(int whose, sockaddr_un* address, socklen_t* bytes) const {
    *address = {};
    address->sun_family = AF_UNIX;
    const std::string name = "fake-nccl/" + id + "/" + std::to_string(whose);
    std::memcpy(address->sun_path + 1, name.data(), name.size());
    *bytes = offsetof(sockaddr_un, sun_path) + 1 + name.size();
  }

  // To lower ranks; higher ones come.
  void Connect() {
    sockets.assign(ranks, -1);
    if (fake::Wished("FAKE_NCCL_ABSENT", rank, 0)) Hang();
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address;
    socklen_t bytes;
    Address(rank, &address, &bytes);
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), bytes) != 0 ||
        listen(listener, ranks) != 0) {
      close(listener);
      Note(kSystemError, "cannot listen");
    }
    for (int peer = 0; peer < rank && !aborted; ++peer) {
      Address(peer, &address, &bytes);
      sockets[peer] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      while (!aborted &&
             connect(sockets[peer], reinterpret_cast<sockaddr*>(&address),
                     bytes) != 0) {
        usleep(500);
      }
      if (!aborted) (void)!write(sockets[peer], &rank, sizeof(rank));
    }
    for (int peer = rank + 1; peer < ranks && !aborted;) {
      pollfd ready = {listener, POLLIN, 0};
      if (poll(&ready, 1, 20) != 1) continue;
      const int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      int who = -1;
      if (read(socket, &who, sizeof(who)) != sizeof(who)) continue;
      sockets[who] = socket;
      ++peer;
    }
    close(listener);
    std::lock_guard<std::mutex> lock(mutex);
    if (!aborted) state = kSuccess;
  }
};

struct Part {
  int peer;
  uint8_t* memory;
  size_t bytes;
  bool sends;
  size_t done = 0;
};

// Moves all parts at once, so that no two ranks wait for each other.
void Move(Comm& comm, std::vector<Part> parts) {
  const auto open = [](const Part& part) { return part.done < part.bytes; };
  while (true) {
    std::vector<pollfd> ready;
    for (const Part& part : parts) {
      const short what = part.sends ? POLLOUT : POLLIN;
      if (open(part)) ready.push_back({comm.sockets[part.peer], what, 0});
    }
    if (ready.empty()) return;
    if (comm.aborted) throw Ended();
    if (poll(ready.data(), ready.size(), 5) <= 0) continue;
    for (Part& part : parts) {
      if (!open(part)) continue;
      uint8_t* place = part.memory + part.done;
      const size_t left = part.bytes - part.done;
      const int socket = comm.sockets[part.peer];
      const int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
      const ssize_t moved = part.sends ? send(socket, place, left, flags)
                                       : recv(socket, place, left, flags);
      if (moved > 0) {
        part.done += moved;
      } else if (moved == 0 || (errno != EAGAIN && errno != EINTR)) {
        comm.Note(kRemoteError, "rank " + std::to_string(part.peer) +
                                    " closed its connection");
      }
    }
  }
}

// Moves parts whose sizes the ranks have told each other first.
void Exchange(Comm& comm, const std::vector<Part>& parts, int64_t what) {
  std::vector<Announced> announced;
  for (const Part& part : parts) announced.push_back({part.bytes, what});
  const std::vector<Announced> expected = announced;
  std::vector<Part> first;
  for (size_t i = 0; i < parts.size(); ++i) {
    first.push_back({parts[i].peer, reinterpret_cast<uint8_t*>(&announced[i]),
                     sizeof(Announced), parts[i].sends});
  }
  Move(comm, first);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (announced[i].bytes != expected[i].bytes || announced[i].what != what) {
      comm.Note(kInvalidUsage,
                "rank " + std::to_string(parts[i].peer) + " sends " +
                    std::to_string(announced[i].bytes) + " bytes, expected " +
                    std::to_string(expected[i].bytes));
    }
  }
  Move(comm, parts);
}

size_t BytesOf(int type) {
  return type == kDouble ? 8 : type == kFloat ? 4 : type == kInt8 ? 1 : 2;
}

double Get(const uint8_t* data, size_t i, int type) {
  if (type == kDouble) return reinterpret_cast<const double*>(data)[i];
  if (type == kFloat) return reinterpret_cast<const float*>(data)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(data)[i];
  if (type == kHalf) return tfdist::FromFloat16(bits);
  return tfdist::FloatOf(static_cast<uint32_t>(bits) << 16);
}

void Set(uint8_t* data, size_t i, int type, double value) {
  if (type == kDouble) {
    reinterpret_cast<double*>(data)[i] = value;
  } else if (type == kFloat) {
    reinterpret_cast<float*>(data)[i] = static_cast<float>(value);
  } else {
    const auto narrow = static_cast<float>(value);
    reinterpret_cast<uint16_t*>(data)[i] =
        type == kHalf ? tfdist::ToFloat16(narrow) : tfdist::ToBfloat16(narrow);
  }
}

// Rank 0 sums in the order of ranks, and tells all.
void Sum(Comm& comm, const uint8_t* input, uint8_t* output, size_t count,
         int type, double factor) {
  const size_t bytes = count * BytesOf(type);
  std::vector<uint8_t> own(bytes), other(bytes);
  for (size_t i = 0; i < count; ++i) {
    Set(own.data(), i, type, factor * Get(input, i, type));
  }
  if (comm.rank != 0) {
    Exchange(comm, {{0, own.data(), bytes, true}}, type);
    Exchange(comm, {{0, output, bytes, false}}, type);
    return;
  }
  for (int peer = 1; peer < comm.ranks; ++peer) {
    Exchange(comm, {{peer, other.data(), bytes, false}}, type);
    for (size_t i = 0; i < count; ++i) {
      const double sum = Get(own.data(), i, type) + Get(other.data(), i, type);
      Set(own.data(), i, type, sum);
    }
  }
  std::memcpy(output, own.data(), bytes);
  for (int peer = 1; peer < comm.ranks; ++peer) {
    Exchange(comm, {{peer, own.data(), bytes, true}}, type);
  }
}

using Handle = std::shared_ptr<Comm>;

// Calls between GroupStart and GroupEnd of this thread.
struct Group {
  int depth = 0;
  Handle comm;
  cudaStream_t stream = nullptr;
  std::vector<Part> parts;
  std::vector<std::function<void()>> sums;
};
thread_local Group group;

void Run(Comm& comm, int launch, const Group& all) {
  try {
    if (fake::Wished("FAKE_NCCL_DIE", comm.rank, launch)) _exit(1);
    if (fake::Wished("FAKE_NCCL_HANG", comm.rank, launch)) comm.Hang();
    if (fake::Wished("FAKE_NCCL_ERROR", comm.rank, launch)) {
      comm.Note(kSystemError, "a cable was pulled");
    }
    Exchange(comm, all.parts, 0);
    for (const auto& sum : all.sums) sum();
  } catch (const Ended&) {
  }
}

}  // namespace

extern "C" {

struct FakeId {
  char bytes[128];
};
struct FakeConfig {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
};

int ncclGetVersion(int* version) {
  const char* wish = std::getenv("FAKE_NCCL_VERSION");
  *version = wish != nullptr ? std::atoi(wish) : 22707;
  return kSuccess;
}

const char* ncclGetErrorString(int error) {
  return error == kSystemError    ? "unhandled system error"
         : error == kRemoteError  ? "remote process exited"
         : error == kInvalidUsage ? "invalid usage"
                                  : "an error";
}

const char* ncclGetLastError(Handle* comm) {
  if (comm == nullptr) return "";
  std::lock_guard<std::mutex> lock((*comm)->mutex);
  return (*comm)->last_error.c_str();
}

int ncclGetUniqueId(FakeId* id) {
  std::random_device random;
  *id = {};
  std::snprintf(id->bytes, sizeof(id->bytes), "%08x%08x", random(), random());
  id->bytes[127] = 1;  // an id has any bytes
  return kSuccess;
}

int ncclCommInitRankConfig(Handle** out, int ranks, FakeId id, int rank,
                           FakeConfig* config) {
  if (config->magic != 0xcafebeef || config->size != sizeof(FakeConfig) ||
      config->blocking != 0 || id.bytes[127] != 1) {
    return kInvalidUsage;
  }
  auto comm = std::make_shared<Comm>();
  fake::Count(1);
  comm->rank = rank;
  comm->ranks = ranks;
  comm->id = id.bytes;
  comm->connecting = std::thread([comm = comm.get()] {
    try {
      comm->Connect();
    } catch (const Ended&) {
    }
  });
  *out = new Handle(std::move(comm));
  return kInProgress;
}

int ncclCommGetAsyncError(Handle* comm, int* state) {
  std::lock_guard<std::mutex> lock((*comm)->mutex);
  *state = (*comm)->state;
  for (auto& [stream, work] : std::exchange((*comm)->begun, {})) {
    *state = kInProgress;
    fake::Enqueue(stream, std::move(work));
  }
  return kSuccess;
}

int ncclCommAbort(Handle* comm) {
  (*comm)->aborted = true;
  (*comm)->connecting.join();
  {
    std::lock_guard<std::mutex> lock((*comm)->mutex);
    (*comm)->begun.clear();
  }
  delete comm;  // the rest goes with what is under way
  return kSuccess;
}

int ncclGroupStart() {
  ++group.depth;
  return kSuccess;
}

int ncclGroupEnd() {
  if (--group.depth > 0) return kSuccess;
  Group all = std::exchange(group, {});
  if (all.comm == nullptr) return kSuccess;
  Handle comm = all.comm;
  std::lock_guard<std::mutex> lock(comm->mutex);
  const int launch = ++comm->launches;
  comm->begun.emplace_back(all.stream,
                           [comm, launch, all] { Run(*comm, launch, all); });
  return kInProgress;
}

static int Add(Handle* comm, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock((*comm)->mutex);
  if (group.depth == 0 || (*comm)->state != kSuccess) return kInvalidUsage;
  group.comm = *comm;
  group.stream = stream;
  return kSuccess;
}

int ncclSend(const void* data, size_t count, int type, int peer, Handle* comm,
             cudaStream_t stream) {
  auto* memory = static_cast<uint8_t*>(const_cast<void*>(data));
  group.parts.push_back({peer, memory, count * BytesOf(type), true});
  return Add(comm, stream);
}

int ncclRecv(void* memory, size_t count, int type, int peer, Handle* comm,
             cudaStream_t stream) {
  group.parts.push_back(
      {peer, static_cast<uint8_t*>(memory), count * BytesOf(type), false});
  return Add(comm, stream);
}

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence,
                             Handle* comm) {
  if (residence != 1) return kInvalidUsage;
  (*comm)->factors.push_back(Get(static_cast<uint8_t*>(scalar), 0, type));
  *op = kFirstOwnOp + static_cast<int>((*comm)->factors.size()) - 1;
  return kSuccess;
}

int ncclRedOpDestroy(int op, Handle* comm) {
  const int i = op - kFirstOwnOp;
  if (i < 0 || i >= static_cast<int>((*comm)->factors.size())) {
    return kInvalidUsage;
  }
  (*comm)->factors[i] = NAN;
  return kSuccess;
}

int ncclAllReduce(const void* input, void* output, size_t count, int type,
                  int op, Handle* comm, cudaStream_t stream) {
  const double factor = op == 0 ? 1 : (*comm)->factors[op - kFirstOwnOp];
  Comm* one = comm->get();
  group.sums.push_back([=] {
    Sum(*one, static_cast<const uint8_t*>(input), static_cast<uint8_t*>(output),
        count, type, factor);
  });
  return Add(comm, stream);
}

}  // extern "C"
