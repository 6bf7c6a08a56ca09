// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda_on_cpu/fibers.h"

// Sets the order in which threads and blocks run: 0 by number, else at random.
extern "C" void SetSchedule(uint32_t seed) { cuda_on_cpu::seed = seed; }
