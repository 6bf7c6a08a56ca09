// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/collective/process_group.h"

namespace tfdist {

namespace {

struct Registry {
  std::mutex mutex;
  int next = 0;
  std::map<int, std::shared_ptr<ProcessGroup>> groups;
};

Registry& TheRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

}  // namespace

int RegisterGroup(std::shared_ptr<ProcessGroup> group) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.groups[registry.next] = std::move(group);
  return registry.next++;
}

std::shared_ptr<ProcessGroup> FindGroup(int handle) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.groups.find(handle);
  return found == registry.groups.end() ? nullptr : found->second;
}

std::shared_ptr<ProcessGroup> RemoveGroup(int handle) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.groups.find(handle);
  if (found == registry.groups.end()) return nullptr;
  std::shared_ptr<ProcessGroup> group = std::move(found->second);
  registry.groups.erase(found);
  return group;
}

}  // namespace tfdist
