// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_COMBINE_FUNCTOR_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_COMBINE_FUNCTOR_H_

#include <cstdint>
#include <vector>

namespace tfdist {

// What one owner sent for one feature: row k belongs to the columns of that
// owner in sample sample_ids[k] of the result.
struct CombineSection {
  const int32_t* sample_ids;  // [samples], strictly ascending
  int64_t samples;
  int64_t first_value;  // of the matrix [samples, width] in the flat values
};

// One range of columns of a feature's result and the owners that hold them: the
// row parts, whose sections are summed.
struct CombineColumns {
  int64_t feature;
  int64_t column;
  int64_t width;
  std::vector<CombineSection> sections;
};

// Sums the sections for samples [begin, end), in their order, zeros for a
// sample of no section. `out` is the result [*, dim] of the feature. Every
// number of the result is written when it is first met, not filled with zeros.
void CombineCpu(const CombineColumns& columns, const float* parts, int64_t dim,
                int64_t begin, int64_t end, float* out);

// The reverse for rows [begin, end) of a section: parts = out * scale, and 0
// for scale 0 whatever is in `out`.
void CombineGradCpu(const CombineColumns& columns,
                    const CombineSection& section, const float* out,
                    int64_t dim, float scale, int64_t begin, int64_t end,
                    float* parts);

// Whether ids ascend strictly and are in [0, limit).
bool AscendingBelow(const int32_t* ids, int64_t count, int64_t limit);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_COMBINE_FUNCTOR_H_
