// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/comm/scratch.h"

#include <cstdlib>
#include <new>

namespace tfdist {

namespace {

constexpr size_t kKeptBytes = size_t{256} << 20;

}  // namespace

struct ScratchPool::State {
  std::mutex mutex;
  size_t kept = 0;
  std::multimap<size_t, uint8_t*> free;  // by size

  ~State() {
    for (auto& [size, memory] : free) std::free(memory);
  }

  void Release(size_t size, uint8_t* memory) {
    std::lock_guard<std::mutex> lock(mutex);
    if (kept + size > kKeptBytes) {
      std::free(memory);
      return;
    }
    kept += size;
    free.emplace(size, memory);
  }
};

ScratchPool::ScratchPool() : state_(std::make_shared<State>()) {}

std::shared_ptr<uint8_t> ScratchPool::Acquire(size_t bytes) {
  size_t size = 4096;
  while (size < bytes) size *= 2;
  uint8_t* memory = nullptr;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    auto found = state_->free.find(size);
    if (found != state_->free.end()) {
      memory = found->second;
      state_->kept -= size;
      state_->free.erase(found);
    }
  }
  if (memory == nullptr) {
    memory = static_cast<uint8_t*>(std::aligned_alloc(64, size));
    if (memory == nullptr) throw std::bad_alloc();
  }
  return std::shared_ptr<uint8_t>(
      memory, [state = state_, size](uint8_t* p) { state->Release(size, p); });
}

}  // namespace tfdist
