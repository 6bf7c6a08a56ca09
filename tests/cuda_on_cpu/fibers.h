// SPDX-License-Identifier: Apache-2.0
//
// The threads of one CUDA block as fibers of one CPU thread. A fiber runs until
// it waits for others; who runs next is the same order for seed 0 and a random
// one for every other seed. Blocks run one after the other, in such an order.
#ifndef TFDIST_TESTS_CUDA_ON_CPU_FIBERS_H_
#define TFDIST_TESTS_CUDA_ON_CPU_FIBERS_H_

#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else
// AddressSanitizer is told of every other stack.
inline void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
inline void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace cuda_on_cpu {

constexpr int kWarpLanes = 32;
constexpr int kAllLanes = -1;  // a source: one bit from every lane
constexpr size_t kStackBytes = 128 << 10;

enum class State { kReady, kAtBlock, kAtWarp, kEnded };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  void* fake_stack = nullptr;  // AddressSanitizer's
  dim3 thread;
  int index = 0;
  State state = State::kReady;
  const char* where = "";
  // What a lane shows to its warp, whose it wants to see, and what it saw.
  uint32_t mask = 0;
  int source = 0;
  uint64_t shown = 0;
  uint64_t seen = 0;
};

// The one block that runs.
struct Block {
  std::vector<Fiber> fibers;
  size_t threads = 0;
  Fiber* current = nullptr;
  const std::function<void()>* kernel = nullptr;
  std::vector<std::max_align_t> dynamic_shared;
  ucontext_t scheduler;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
};

inline Block block;
inline std::mt19937 random_order;
inline uint32_t seed = 0;
inline uint64_t launches = 0;  // so far
// TensorFlow runs kernels side by side; there is one block.
inline std::mutex one_launch;

[[noreturn]] inline void Fail(const Fiber& fiber, const char* what) {
  std::fprintf(stderr, "cuda_on_cpu: thread %d of block (%u, %u, %u): %s: %s\n",
               fiber.index, blockIdx.x, blockIdx.y, blockIdx.z, fiber.where,
               what);
  std::exit(70);
}

inline void ToScheduler(Fiber* me) {
  const bool ended = me->state == State::kEnded;
  __sanitizer_start_switch_fiber(ended ? nullptr : &me->fake_stack,
                                 block.scheduler_stack,
                                 block.scheduler_stack_bytes);
  swapcontext(&me->context, &block.scheduler);
  __sanitizer_finish_switch_fiber(me->fake_stack, nullptr, nullptr);
}

inline void RunFiber() {
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack,
                                  &block.scheduler_stack_bytes);
  (*block.kernel)();
  block.current->state = State::kEnded;
  ToScheduler(block.current);
}

inline void Resume(Fiber* fiber) {
  block.current = fiber;
  threadIdx = fiber->thread;
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fiber->stack.get(), kStackBytes);
  swapcontext(&block.scheduler, &fiber->context);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

inline void Wait(State state, const char* where) {
  block.current->state = state;
  block.current->where = where;
  ToScheduler(block.current);
}

// Lets others run first, with random orders: between threads without a barrier
// anything may happen.
inline void MayYield() {
  if (seed != 0 && random_order() % 2 == 0) Wait(State::kReady, "an atomic");
}

inline bool OpenBlock() {
  for (size_t i = 0; i < block.threads; ++i) {
    if (block.fibers[i].state != State::kAtBlock) return false;
  }
  for (size_t i = 0; i < block.threads; ++i) {
    block.fibers[i].state = State::kReady;
  }
  return true;
}

// The lanes of a warp that `fiber` waits for, itself among them; none if not
// all of them wait at the same place.
inline std::vector<Fiber*> Meeting(const Fiber& fiber) {
  std::vector<Fiber*> lanes;
  const int first = fiber.index / kWarpLanes * kWarpLanes;
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if (!(fiber.mask >> lane & 1)) continue;
    if (static_cast<size_t>(first + lane) >= block.threads) continue;
    Fiber& other = block.fibers[first + lane];
    if (other.state == State::kEnded) Fail(fiber, "a lane has ended");
    if (other.state != State::kAtWarp || other.mask != fiber.mask ||
        other.where != fiber.where) {
      return {};
    }
    lanes.push_back(&other);
  }
  return lanes;
}

inline bool OpenWarp(const Fiber& fiber) {
  const std::vector<Fiber*> lanes = Meeting(fiber);
  const int first = fiber.index / kWarpLanes * kWarpLanes;
  uint64_t bits = 0;
  for (const Fiber* lane : lanes) {
    bits |= uint64_t{lane->shown != 0} << (lane->index - first);
  }
  for (Fiber* lane : lanes) {
    lane->seen = bits;
    if (lane->source == kAllLanes) continue;
    // A lane that does not take part shows nothing that may be relied upon.
    lane->seen = 0xBADBADBADBADBAD;
    for (const Fiber* other : lanes) {
      if (other->index - first == lane->source) lane->seen = other->shown;
    }
  }
  for (Fiber* lane : lanes) lane->state = State::kReady;
  return !lanes.empty();
}

inline void Prepare(size_t index) {
  Fiber& fiber = block.fibers[index];
  fiber.index = static_cast<int>(index);
  fiber.state = State::kReady;
  fiber.fake_stack = nullptr;
  fiber.thread = dim3(index % blockDim.x, index / blockDim.x % blockDim.y,
                      index / blockDim.x / blockDim.y);
  if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, RunFiber, 0);
}

inline std::vector<size_t> Order(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  if (seed != 0) std::shuffle(order.begin(), order.end(), random_order);
  return order;
}

inline void RunBlock() {
  for (size_t i = 0; i < block.threads; ++i) Prepare(i);
  const std::vector<size_t> order = Order(block.threads);
  for (bool going = true; going;) {
    going = false;
    for (size_t i : order) {
      if (block.fibers[i].state != State::kReady) continue;
      Resume(&block.fibers[i]);
      going = true;
    }
    for (size_t i : order) {
      if (block.fibers[i].state != State::kAtWarp) continue;
      going |= OpenWarp(block.fibers[i]);
    }
    going |= OpenBlock();
  }
  for (size_t i = 0; i < block.threads; ++i) {
    if (block.fibers[i].state == State::kEnded) continue;
    Fail(block.fibers[i], "waits for ever");
  }
}

// Runs all blocks of a grid.
template <typename Kernel>
void Launch(dim3 grid, dim3 threads, size_t shared_bytes,
            const Kernel& kernel) {
  const std::lock_guard<std::mutex> lock(one_launch);
  ++launches;
  const std::function<void()> function = kernel;
  block.kernel = &function;
  gridDim = grid;
  blockDim = threads;
  block.threads = size_t{threads.x} * threads.y * threads.z;
  if (block.fibers.size() < block.threads) block.fibers.resize(block.threads);
  random_order.seed(seed);
  for (size_t i : Order(size_t{grid.x} * grid.y * grid.z)) {
    blockIdx = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
    // Anew, so that what the block before left is not found in it.
    const size_t size = sizeof(std::max_align_t);
    block.dynamic_shared.clear();
    block.dynamic_shared.shrink_to_fit();
    block.dynamic_shared.resize((shared_bytes + size - 1) / size);
    RunBlock();
  }
}

}  // namespace cuda_on_cpu

#endif  // TFDIST_TESTS_CUDA_ON_CPU_FIBERS_H_
