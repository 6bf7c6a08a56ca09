// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/process_group.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "custom_ops/comm/clock.h"
#include "custom_ops/common/message.h"

namespace tfdist {

namespace {

// Limit of recorded operations that are not taken yet. Each uses about 100
// bytes.
constexpr size_t kMostTraced = 1 << 20;

bool DebugRequested() {
  const char* value = std::getenv("TFDIST_DEBUG");
  return value != nullptr && value[0] != '\0' && std::strcmp(value, "0") != 0;
}

}  // namespace

ProcessGroup::ProcessGroup(GroupOptions options,
                           std::vector<Transport::Pair> sockets)
    : options_(std::move(options)),
      debug_(DebugRequested()),
      all_reduce_choice_(options_.addresses, options_.all_reduce),
      requests_(options_.world_size),
      peers_(options_.world_size),
      transport_(std::move(sockets), options_.timeout, scratch_,
                 options_.most_early) {
  stats_.waited.resize(options_.world_size);
}

ProcessGroup::~ProcessGroup() { Close(); }

void ProcessGroup::Start() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    started_ = true;
  }
  transport_.Start(this);
}

void ProcessGroup::Close(const std::string& error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return;
    closing_ = true;
    changed_.notify_all();
  }
  SendGoodbye(error);
  std::unique_lock<std::mutex> lock(mutex_);
  closed_ = true;
  for (const auto& operation : running_) {
    if (operation->background) operation->Abort();
  }
  changed_.wait_for(lock, std::chrono::seconds(5),
                    [&] { return running_.empty(); });
  lock.unlock();
  transport_.Stop();
}

std::string ProcessGroup::RankName(int rank) const {
  return Message("rank ", rank, " (", options_.addresses[rank], ")");
}

std::shared_ptr<Channel> ProcessGroup::Acquire(const Operation& operation) {
  std::shared_ptr<Channel>& channel = channels_[operation.tag];
  if (channel == nullptr) channel = std::make_shared<Channel>();
  return channel;
}

void ProcessGroup::Run(std::shared_ptr<Operation> operation, bool post_inline,
                       std::function<void()> post, std::function<void()> body,
                       std::function<void(absl::Status)> done) {
  absl::Status refused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_ || !started_) {
      refused = absl::FailedPreconditionError(
          Message("rank ", rank(), ": ", operation->Name(),
                  " needs an open process group; this one is ",
                  closing_ ? "closed" : "not started"));
    } else if (operation->only_generation >= 0 &&
               operation->only_generation != generation_) {
      refused =
          absl::AbortedError(Message("rank ", rank(), ": ", operation->Name(),
                                     " belongs to a call that has failed"));
    } else {
      operation->generation = generation_;
      operation->channel = Acquire(*operation);
      // There are no ticks without operations.
      if (running_.empty()) last_tick_ = Now();
      running_.insert(operation);
      transport_.Tick();
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
  // Converts an exception of `task` to a status. After an unexpected exception,
  // messages may be partly sent, so the group fails.
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
  if (failed() || Stale(*operation) || operation->given_up()) {
    posted = FailureOf(*operation);
  } else if (post_inline) {
    posted = guarded(post);
  }
  const auto run = [=] {
    absl::Status status = posted;
    if (status.ok() && !post_inline) status = guarded(post);
    if (status.ok()) status = guarded(body);
    Finish(operation, status, done);
  };
  try {
    waiters_.Schedule(run);
  } catch (const std::system_error& error) {
    Fail(rank(), absl::StatusCode::kResourceExhausted,
         Message(RankName(rank()), " cannot start a thread: ", error.what()));
    Finish(operation, FailureOf(*operation), done);
  }
}

void ProcessGroup::Finish(const std::shared_ptr<Operation>& operation,
                          const absl::Status& status,
                          const std::function<void(absl::Status)>& done) {
  const int64_t end = Now();
  const double seconds = static_cast<double>(end - operation->start) / 1e9;
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
    if (traces() && traced_.size() < kMostTraced) {
      const auto call = static_cast<int64_t>(operation->channel->calls);
      traced_.push_back({operation->label, operation->kind, operation->tag,
                         call, operation->start, end, operation->SentTo(),
                         operation->ReceivedFrom()});
    }
  }
  operation->Release();
  std::function<void()> next;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Channel& channel = *operation->channel;
    ++channel.calls;
    if (channel.waiting.empty()) {
      channel.busy = false;
    } else {
      next = std::move(channel.waiting.front());
      channel.waiting.pop_front();
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

std::shared_ptr<GpuLinks> ProcessGroup::gpu_links() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return gpu_links_;
}

void ProcessGroup::SetGpuLinks(std::shared_ptr<GpuLinks> links) {
  std::lock_guard<std::mutex> lock(mutex_);
  gpu_links_.swap(links);
}

GroupStats ProcessGroup::Stats() const {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  GroupStats stats = stats_;
  stats.writes = transport_.writes();
  return stats;
}

std::vector<TracedOperation> ProcessGroup::Trace(bool on) {
  traces_ = on;
  std::lock_guard<std::mutex> lock(stats_mutex_);
  return std::exchange(traced_, {});
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

void ProcessGroup::BeginWait() {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  if (waiting_++ == 0) waiting_since_ = Now();
}

void ProcessGroup::EndWait(int peer) {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  const int64_t now = Now();
  stats_.waited[peer] += static_cast<double>(now - waiting_since_) / 1e9;
  waiting_since_ = now;
  --waiting_;
}

}  // namespace tfdist
