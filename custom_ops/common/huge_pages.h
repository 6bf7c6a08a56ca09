// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_HUGE_PAGES_H_
#define TFDIST_CUSTOM_OPS_COMMON_HUGE_PAGES_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

constexpr uintptr_t kHugePage = uintptr_t{1} << 21;

// Requests huge pages for a buffer, on Linux systems that provide them only on
// request. Rows are scattered over a table. With small pages, nearly every row
// also needs a walk through the page tables, which takes as long as the row
// itself. Does nothing for small buffers, or if the environment variable
// TFDIST_HUGE_PAGES is 0. The contents do not change.
//
// Works best before the buffer is first written to.
void AdviseHugePages(void* data, size_t bytes);

// Like AdviseHugePages, for a buffer that has been written to. Replaces the
// pages at once, in about the time of a copy, without a second buffer. On
// kernels before 6.1, this happens in the background, if at all. Does nothing
// for an address that it was called with before.
void ExchangeForHugePages(void* data, size_t bytes);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_HUGE_PAGES_H_
