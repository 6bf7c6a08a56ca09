// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_COMMON_TARGET_CLONES_H_
#define TFDIST_COMMON_TARGET_CLONES_H_

// The wheel runs on any x86-64; the dynamic linker picks the fastest clone of a
// function. Inlined callees are compiled for the clone's processor as well.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TFDIST_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TFDIST_CLONES
#endif
#define TFDIST_INLINE inline __attribute__((always_inline))

#endif  // TFDIST_COMMON_TARGET_CLONES_H_
