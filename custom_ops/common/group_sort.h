// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMMON_GROUP_SORT_H_
#define TFDIST_CUSTOM_OPS_COMMON_GROUP_SORT_H_

#include <cstdint>

namespace tfdist {

// Low bits by which keys can be sorted in groups, at most.
constexpr int kMostGroupBits = 24;

// From this many keys per group on it is faster than RadixSort.
constexpr int64_t kFewestPerGroup = 8;

// Sorts keys that are in order but for their `low_bits`: a group is those that
// agree in the bits above, such as the rows of one sample. Returns false if a
// group is larger than what is sorted in this way; some may be sorted then.
bool SortGroups(uint64_t* keys, int64_t count, int low_bits);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMMON_GROUP_SORT_H_
