// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_TESTS_FAKE_GPU_FAKE_H_
#define TFDIST_TESTS_FAKE_GPU_FAKE_H_

#include <functional>
#include <string>

#include "cuda_runtime_api.h"

namespace fake {

// What is open: streams, events, blocks of host memory and communicators.
void Count(int change);

// Whether the environment asks that this happens to a rank at its n-th launch:
// "1@3", or "1@*" at all of them.
bool Wished(const char* variable, int rank, int launch);

// Given to a stream, after all that it has been given.
void Enqueue(cudaStream_t stream, std::function<void()> work);

}  // namespace fake

#endif  // TFDIST_TESTS_FAKE_GPU_FAKE_H_
