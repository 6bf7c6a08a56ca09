// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_TARGET_CLONES_H_
#define TFDIST_CUSTOM_OPS_COMMON_TARGET_CLONES_H_

// The wheel runs on any x86-64 processor. The dynamic linker selects the
// fastest clone of a function. Inlined callees are also compiled for the
// clone's processor. The selection runs before a sanitizer is initialized, so
// clones are disabled under sanitizers. TFDIST_NO_CLONES lets a test compile a
// function for one processor.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__CUDACC__) && !defined(__SANITIZE_ADDRESS__) &&          \
    !defined(__SANITIZE_THREAD__) && !defined(TFDIST_NO_CLONES)
#define TFDIST_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TFDIST_CLONES
#endif
#define TFDIST_ALWAYS __attribute__((always_inline))
// GPU kernels use the same functions.
#if defined(__CUDACC__)
#define TFDIST_INLINE __host__ __device__ inline TFDIST_ALWAYS
#else
#define TFDIST_INLINE inline TFDIST_ALWAYS
#endif

// Functions that are always inlined pass no vectors in registers, so this
// warning about the ABI of clones does not apply.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#endif  // TFDIST_CUSTOM_OPS_COMMON_TARGET_CLONES_H_
