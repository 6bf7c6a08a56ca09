// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_GROUP_SORT_H_
#define TFDIST_CUSTOM_OPS_COMMON_GROUP_SORT_H_

#include <cstdint>

namespace tfdist {

// The maximum number of low bits for SortGroups.
constexpr int kMostGroupBits = 24;

// The minimum number of keys per group for which SortGroups is faster than
// RadixSort.
constexpr int64_t kFewestPerGroup = 8;

// Sorts keys that are already in order except for their `low_bits`. A group
// consists of keys with the same higher bits, such as the rows of one sample.
// Returns false if a group is too large; some groups may then be sorted.
bool SortGroups(uint64_t* keys, int64_t count, int low_bits);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_GROUP_SORT_H_
