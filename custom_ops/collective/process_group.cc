// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/collective/process_group.h"

#include <gloo/transport/address.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "custom_ops/common/message.h"

namespace tfdist {

namespace {

uint64_t Hash(uint64_t hash, const std::string& text) {
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001B3u;
  return hash;
}

bool DebugRequested() {
  const char* value = std::getenv("TFDIST_DEBUG");
  return value != nullptr && value[0] != '\0' && std::strcmp(value, "0") != 0;
}

}  // namespace

ProcessGroup::ProcessGroup(GroupOptions options)
    : options_(std::move(options)),
      debug_(DebugRequested()),
      peers_(options_.world_size) {
  gloo::transport::tcp::attr attr;
  attr.hostname = options_.bind_address;
  device_ = gloo::transport::tcp::CreateDevice(attr);
  context_ = device_->createContext(rank(), world_size());
  // Gloo waits five times this long for a connection.
  context_->setTimeout(std::chrono::milliseconds(
      std::max<int64_t>(1, static_cast<int64_t>(options_.timeout * 200))));
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) context_->createPair(peer);
  }
}

ProcessGroup::~ProcessGroup() { Close(); }

std::string ProcessGroup::AddressBlob() const {
  std::string blob;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    const std::vector<char> bytes = context_->getPair(peer)->address().bytes();
    blob.append(bytes.data(), bytes.size());
  }
  return blob;
}

absl::Status ProcessGroup::Connect(const std::vector<std::string>& blobs) {
  uint64_t digest = 0xCBF29CE484222325u;
  for (const std::string& blob : blobs) digest = Hash(digest, blob);
  const size_t peer_count = world_size() - 1;
  const size_t size = AddressBlob().size() / peer_count;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (blobs[peer].size() != size * peer_count) {
      return absl::InvalidArgumentError(
          Message("rank ", rank(), ": the address blob of rank ", peer, " has ",
                  blobs[peer].size(), " bytes, expected ", size * peer_count));
    }
  }
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    // A rank's blob has no entry for itself.
    const size_t place = rank() > peer ? rank() - 1 : rank();
    const char* bytes = blobs[peer].data() + place * size;
    try {
      context_->getPair(peer)->connect(std::vector<char>(bytes, bytes + size));
    } catch (const std::exception& error) {
      return absl::UnavailableError(
          Message("rank ", rank(), " cannot connect to ", RankName(peer), ": ",
                  error.what()));
    }
  }
  StartControl(digest);
  return AwaitHellos();
}

void ProcessGroup::Close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return;
    closing_ = true;
  }
  StopControl();
  // Buffers before the pairs they are posted on, pairs before their device.
  std::unique_lock<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.wait_for(lock, std::chrono::seconds(5),
                    [&] { return running_.empty(); });
  if (!running_.empty()) return;  // never seen; leaking beats crashing
  for (ControlPeer& peer : peers_) peer.buffer.reset();
  channels_.clear();
  retired_.clear();
  graveyard_.clear();
  control_sends_.clear();
  context_.reset();
  device_.reset();
}

std::string ProcessGroup::RankName(int rank) const {
  return Message("rank ", rank, " (", options_.addresses[rank], ")");
}

size_t ProcessGroup::MaximumFrame() const {
  // Receives of frames are posted ahead, one per tag and peer: keep their sum
  // per tag about 1 MB.
  const size_t limit = (size_t{1} << 20) / world_size();
  return std::max(kInitialFrame, std::min(limit, size_t{256} << 10));
}

size_t ProcessGroup::NextCapacity(size_t capacity, uint64_t bytes) const {
  const size_t wanted =
      std::min<uint64_t>(bytes + sizeof(Header), MaximumFrame());
  while (capacity < wanted) capacity *= 2;
  return capacity;
}

Channel* ProcessGroup::Acquire(Operation& operation) {
  std::unique_ptr<Channel>& channel = channels_[operation.tag];
  if (channel == nullptr) {
    channel = std::make_unique<Channel>();
    channel->tag = operation.tag;
    channel->peers.resize(world_size());
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer == rank()) continue;
      channel->peers[peer].in.Resize(*context_, kInitialFrame);
      channel->peers[peer].out.Resize(*context_, kInitialFrame);
    }
  }
  return channel.get();
}

void ProcessGroup::Run(std::shared_ptr<Operation> operation, bool post_inline,
                       std::function<void()> post, std::function<void()> body,
                       std::function<void(absl::Status)> done) {
  absl::Status refused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_ || !connected_) {
      refused = absl::FailedPreconditionError(
          Message("rank ", rank(), ": ", operation->Name(),
                  " needs an open process group; this one is ",
                  closing_ ? "closed" : "not connected"));
    } else {
      operation->generation = generation_;
      operation->channel = Acquire(*operation);
      running_.insert(operation);
      if (operation->channel->busy) {
        operation->channel->waiting.push_back(
            [=] { Begin(operation, post_inline, post, body, done); });
        return;
      }
      operation->channel->busy = true;
    }
  }
  if (!refused.ok()) return done(refused);
  Begin(std::move(operation), post_inline, std::move(post), std::move(body),
        std::move(done));
}

void ProcessGroup::Begin(std::shared_ptr<Operation> operation, bool post_inline,
                         std::function<void()> post, std::function<void()> body,
                         std::function<void(absl::Status)> done) {
  Debug(*operation, "start");
  // What `task` throws becomes a status. An error nobody expected may have
  // left messages half way, so it ends the group.
  auto guarded = [operation](const std::function<void()>& task) {
    try {
      task();
      return absl::OkStatus();
    } catch (const OperationError& error) {
      if (error.group_lost) {
        operation->group->Fail(operation->group->rank(), error.status.code(),
                               std::string(error.status.message()));
      }
      return error.status;
    } catch (const std::exception& error) {
      operation->group->Fail(operation->group->rank(),
                             absl::StatusCode::kInternal, error.what());
      return operation->group->FailureOf(*operation);
    }
  };
  absl::Status posted;
  if (failed() || Stale(*operation)) {
    posted = FailureOf(*operation);
  } else if (post_inline) {
    posted = guarded(post);
  }
  waiters_.Schedule([=] {
    absl::Status status = posted;
    if (status.ok() && !post_inline) status = guarded(post);
    if (status.ok()) status = guarded(body);
    Finish(operation, status, done);
  });
}

void ProcessGroup::Finish(const std::shared_ptr<Operation>& operation,
                          const absl::Status& status,
                          const std::function<void(absl::Status)>& done) {
  const double seconds =
      std::chrono::duration<double>(Clock::now() - operation->start).count();
  if (debug_) {
    Debug(*operation,
          Message(status.ok() ? "done" : "failed", " in ", seconds * 1e3,
                  " ms, sent ", operation->bytes_sent, " B, received ",
                  operation->bytes_received, " B"));
  }
  {
    std::lock_guard<std::mutex> lock(stats_mutex_);
    ++stats_.calls;
    GroupStats::PerLabel& label = stats_.labels[operation->label];
    ++label.calls;
    label.bytes += operation->bytes_sent;
    label.seconds += seconds;
  }
  std::function<void()> next;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Channel& channel = *operation->channel;
    if (channel.waiting.empty()) {
      channel.busy = false;
    } else {
      next = std::move(channel.waiting.front());
      channel.waiting.pop_front();
    }
    if (failed()) {
      graveyard_.push_back(operation);
    } else if (!status.ok() && causes_.count(operation->generation) > 0) {
      retired_[operation->generation].operations.push_back(operation);
    } else {
      operation->Release();
    }
    running_.erase(operation);
    if (closing_) changed_.notify_all();
  }
  if (next) next();
  done(status);
}

void ProcessGroup::Debug(const Operation& operation,
                         const std::string& text) const {
  if (!debug_) return;
  std::fprintf(stderr, "r%d | %s tag=%lld %s\n", rank(),
               operation.Name().c_str(), static_cast<long long>(operation.tag),
               text.c_str());
}

GroupStats ProcessGroup::Stats() const {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  return stats_;
}

void ProcessGroup::CountSent(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  stats_.bytes_sent += bytes;
  ++stats_.messages_sent;
}

void ProcessGroup::CountReceived(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  stats_.bytes_received += bytes;
  ++stats_.messages_received;
}

}  // namespace tfdist
