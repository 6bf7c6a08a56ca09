// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>

#include "custom_ops/comm/process_group.h"

namespace tfdist {

namespace {

struct Registry {
  std::mutex mutex;
  int64_t next = 0;
  std::map<int64_t, std::shared_ptr<ProcessGroup>> groups;
};

Registry& TheRegistry();

// A forked process is not a member of the groups of its parent. It closes its
// copies of the connections, because the peers could otherwise not detect the
// death of the parent. It never uses the groups themselves, because it lacks
// their threads.
void PrepareFork() { TheRegistry().mutex.lock(); }
void AfterForkInParent() { TheRegistry().mutex.unlock(); }
void AfterForkInChild() {
  Registry& registry = TheRegistry();
  for (auto& [handle, group] : registry.groups) {
    group->CloseInChild();
    new std::shared_ptr<ProcessGroup>(std::move(group));
  }
  registry.groups.clear();
  registry.mutex.unlock();
}

Registry& TheRegistry() {
  static Registry* registry = [] {
    auto* made = new Registry;
    pthread_atfork(PrepareFork, AfterForkInParent, AfterForkInChild);
    return made;
  }();
  return *registry;
}

}  // namespace

int64_t RegisterGroup(std::shared_ptr<ProcessGroup> group) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.groups[registry.next] = std::move(group);
  return registry.next++;
}

std::shared_ptr<ProcessGroup> FindGroup(int64_t handle) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.groups.find(handle);
  return found == registry.groups.end() ? nullptr : found->second;
}

std::shared_ptr<ProcessGroup> RemoveGroup(int64_t handle) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.groups.find(handle);
  if (found == registry.groups.end()) return nullptr;
  std::shared_ptr<ProcessGroup> group = std::move(found->second);
  registry.groups.erase(found);
  return group;
}

}  // namespace tfdist
