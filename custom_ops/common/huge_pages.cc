// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/common/huge_pages.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace tfdist {
namespace {

// Smaller buffers need so few pages that the processor caches their addresses.
constexpr size_t kSmallest = 2 * kHugePage;
constexpr int kTries = 3;

bool Wanted() {
  static const bool wanted = [] {
    const char* value = std::getenv("TFDIST_HUGE_PAGES");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  return wanted;
}

// Whether `data` is new. The set contains tables and their slots, so its size
// is limited by those that a program creates.
bool IsNew(const void* data) {
  static std::mutex mutex;
  static auto* known = new std::unordered_set<const void*>;
  const std::lock_guard<std::mutex> lock(mutex);
  return known->insert(data).second;
}

// Calls madvise for the huge pages within the buffer, in parts. Retries a page
// that is in use. Stops if there is no contiguous free memory.
void Advise(void* data, size_t bytes, int advice, uintptr_t part) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
#ifdef __linux__
  for (uintptr_t at = begin; at < end; at += part) {
    const size_t size = std::min(part, end - at);
    for (int tries = 0; tries < kTries; ++tries) {
      if (madvise(reinterpret_cast<void*>(at), size, advice) == 0) break;
      if (errno != EAGAIN) return;
    }
  }
#endif
}

}  // namespace

void AdviseHugePages(void* data, size_t bytes) {
#ifdef MADV_HUGEPAGE
  if (!Wanted()) return;
  Advise(data, bytes, MADV_HUGEPAGE, bytes);
#endif
}

void ExchangeForHugePages(void* data, size_t bytes) {
  if (!Wanted() || bytes < kSmallest || !IsNew(data)) return;
  AdviseHugePages(data, bytes);
#ifdef __linux__
  constexpr int kMadvCollapse = 25;  // newer than some C libraries
  constexpr uintptr_t kPart = 32 * kHugePage;
  Advise(data, bytes, kMadvCollapse, kPart);
#endif
}

}  // namespace tfdist
