// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_HUGE_PAGES_H_
#define TFDIST_CUSTOM_OPS_COMMON_HUGE_PAGES_H_

#include <cstddef>
#include <cstdint>

namespace tfdist {

constexpr uintptr_t kHugePage = uintptr_t{1} << 21;

// Asks for huge pages behind a buffer, where Linux gives them only on request.
// Rows are scattered over a table: with small pages nearly every row also
// costs a walk through the page tables, which takes as long as the row itself.
// Small buffers are left alone; so are all with TFDIST_HUGE_PAGES=0 in the
// environment. Contents stay as they are.
//
// Best before the buffer is first written to.
void AdviseHugePages(void* data, size_t bytes);

// The same for a buffer that has been written to: exchanges its pages at once,
// in about the time of a copy, without a second buffer. On kernels before 6.1
// the exchange happens in the background, if at all. Does nothing for an
// address that was given before.
void ExchangeForHugePages(void* data, size_t bytes);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_HUGE_PAGES_H_
