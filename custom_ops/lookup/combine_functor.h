// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_COMBINE_FUNCTOR_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_COMBINE_FUNCTOR_H_

#include <cstdint>
#include <vector>

namespace tfdist {

// The results of one owner for one feature. Row k belongs to this owner's
// columns of sample sample_ids[k].
struct CombineSection {
  const int32_t* sample_ids;  // [samples], strictly ascending
  int64_t samples;
  // Where the matrix [samples, width] starts in the flat values.
  int64_t first_value;
};

// A range of columns of a feature's result, and the sections of the owners that
// hold these columns. The owners hold row parts, whose results are summed.
struct CombineColumns {
  int64_t feature;
  int64_t column;
  int64_t width;
  std::vector<CombineSection> sections;
};

// Sums the sections for samples [begin, end), in the order of the sections.
// Samples without a section get zeros. `out` is the result [*, dim] of the
// feature. The first section to reach a sample overwrites `out`, so `out` need
// not be zero before.
void CombineCpu(const CombineColumns& columns, const float* parts, int64_t dim,
                int64_t begin, int64_t end, float* out);

// The gradient of CombineCpu, for rows [begin, end) of a section: parts = out *
// scale. If scale is 0, parts is 0 for any value of `out`.
void CombineGradCpu(const CombineColumns& columns,
                    const CombineSection& section, const float* out,
                    int64_t dim, float scale, int64_t begin, int64_t end,
                    float* parts);

// Whether ids are strictly ascending and in [0, limit).
bool AscendingBelow(const int32_t* ids, int64_t count, int64_t limit);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_COMBINE_FUNCTOR_H_
