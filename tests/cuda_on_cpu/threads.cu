// SPDX-License-Identifier: Apache-2.0
//
// Kernels that test the emulation itself: what is right passes, and what is
// wrong is found. The argument says which, the second one the schedule.
#include <cuda_runtime.h>

#include <cstdio>
#include <string>
#include <vector>

namespace {

constexpr int kThreads = 96;

// Every thread of a block gets what its opposite has; `barrier` or not.
__global__ void Reverse(const int* in, int* out, bool barrier) {
  extern __shared__ int kept[];
  const unsigned first = blockIdx.x * blockDim.x;
  kept[threadIdx.x] = in[first + threadIdx.x];
  if (barrier) __syncthreads();
  out[first + threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

// Sections of 8 lanes: their sum by halves, the first lane's number, whether a
// number is odd, and how many threads there are.
__global__ void Lanes(const int* in, int* sums, int* firsts, unsigned* odd,
                      int* count) {
  const int mine = in[threadIdx.x];
  const unsigned mask = 0xFFu << (threadIdx.x % 32 / 8 * 8);
  int sum = mine;
  for (int half = 4; half > 0; half /= 2) {
    sum += __shfl_down_sync(mask, sum, half, 8);
  }
  firsts[threadIdx.x] = __shfl_sync(mask, mine, 0, 8);
  if (threadIdx.x % 8 == 0) sums[threadIdx.x / 8] = sum;
  const unsigned bits = __ballot_sync(~0u, mine % 2);
  if (threadIdx.x % 32 == 0) odd[threadIdx.x / 32] = bits;
  atomicAdd(count, 1);
}

// A barrier that half of the threads never reach.
__global__ void Deadlock() {
  if (threadIdx.x < kThreads / 2) __syncthreads();
}

// A shuffle whose mask names lanes that have ended.
__global__ void EndedLane(int* out) {
  if (threadIdx.x % 2 == 0) return;
  *out = __shfl_sync(~0u, 1, 0);
}

__global__ void Write(int* out, int at) { out[at] = 1; }

int Check(const std::vector<int>& got, const std::vector<int>& expected) {
  if (got == expected) return 0;
  std::fprintf(stderr, "wrong numbers\n");
  return 1;
}

int RunReverse(bool barrier) {
  std::vector<int> in, out(3 * kThreads, -1), expected;
  for (int i = 0; i < 3 * kThreads; ++i) in.push_back(i * i);
  for (int i = 0; i < 3 * kThreads; ++i) {
    expected.push_back(
        in[i / kThreads * kThreads + kThreads - 1 - i % kThreads]);
  }
  Reverse<<<3, kThreads, kThreads * sizeof(int)>>>(in.data(), out.data(),
                                                   barrier);
  return Check(out, expected);
}

int RunLanes() {
  std::vector<int> in, sums(kThreads / 8), firsts(kThreads), all;
  std::vector<int> sums_expected(kThreads / 8), firsts_expected(kThreads);
  unsigned odd[3] = {}, odd_expected[3] = {};
  int count = 0;
  for (int i = 0; i < kThreads; ++i) {
    in.push_back(i * 7 % 13);
    sums_expected[i / 8] += in[i];
    firsts_expected[i] = in[i / 8 * 8];
    odd_expected[i / 32] |= static_cast<unsigned>(in[i] % 2) << (i % 32);
  }
  Lanes<<<dim3(1), dim3(kThreads)>>>(in.data(), sums.data(), firsts.data(), odd,
                                     &count);
  return Check(sums, sums_expected) + Check(firsts, firsts_expected) +
         (std::equal(odd, odd + 3, odd_expected) ? 0 : 1) +
         (count == kThreads ? 0 : 1);
}

}  // namespace

int main(int, char** arguments) {
  const std::string what = arguments[1];
  cuda_on_cpu::seed = std::stoi(arguments[2]);
  std::vector<int> one(1);
  one.shrink_to_fit();
  if (what == "reverse") return RunReverse(true);
  if (what == "no barrier") return RunReverse(false);
  if (what == "lanes") return RunLanes();
  if (what == "deadlock") Deadlock<<<1, kThreads>>>();
  if (what == "ended lane") EndedLane<<<1, kThreads>>>(one.data());
  if (what == "write") Write<<<1, 1>>>(one.data(), 0);
  if (what == "out of bounds") Write<<<1, 1>>>(one.data(), 1);
  if (what == "too many threads") {
    Write<<<1, 2048>>>(one.data(), 0);
    return cudaGetLastError() == cudaErrorInvalidConfiguration ? 0 : 1;
  }
  return 0;
}
