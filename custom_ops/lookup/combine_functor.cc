// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/lookup/combine_functor.h"

#include <algorithm>
#include <cstring>

#include "custom_ops/common/target_clones.h"

namespace tfdist {
namespace {

// Number of samples that are computed at a time, so that their part of the
// result stays in the cache while the sections are added.
constexpr int64_t kSamplesAtOnce = 128;

TFDIST_INLINE void CopyRow(const float* from, int64_t width, float* to) {
  for (int64_t j = 0; j < width; ++j) to[j] = from[j];
}

// Adds one section to the samples [first, first + kSamplesAtOnce).
TFDIST_INLINE void AddSection(const CombineSection& section, int64_t begin,
                              int64_t end, const float* values, int64_t width,
                              int64_t first, int64_t dim, float* out,
                              bool* written) {
  for (int64_t k = begin; k < end; ++k) {
    const int64_t sample = section.sample_ids[k];
    const float* from = values + k * width;
    float* to = out + sample * dim;
    if (written[sample - first]) {
      for (int64_t j = 0; j < width; ++j) to[j] += from[j];
    } else {
      CopyRow(from, width, to);
      written[sample - first] = true;
    }
  }
}

}  // namespace

TFDIST_CLONES
void CombineCpu(const CombineColumns& columns, const float* parts, int64_t dim,
                int64_t begin, int64_t end, float* out) {
  out += columns.column;
  std::vector<int64_t> next;  // the next row of each section
  for (const CombineSection& section : columns.sections) {
    next.push_back(std::lower_bound(section.sample_ids,
                                    section.sample_ids + section.samples,
                                    begin) -
                   section.sample_ids);
  }
  for (int64_t first = begin; first < end; first += kSamplesAtOnce) {
    const int64_t stop = std::min(first + kSamplesAtOnce, end);
    bool written[kSamplesAtOnce] = {};
    for (size_t i = 0; i < next.size(); ++i) {
      const CombineSection& section = columns.sections[i];
      int64_t after = next[i];
      while (after < section.samples && section.sample_ids[after] < stop) {
        ++after;
      }
      AddSection(section, next[i], after, parts + section.first_value,
                 columns.width, first, dim, out, written);
      next[i] = after;
    }
    for (int64_t sample = first; sample < stop; ++sample) {
      if (written[sample - first]) continue;
      std::memset(out + sample * dim, 0, columns.width * sizeof(float));
    }
  }
}

TFDIST_CLONES
void CombineGradCpu(const CombineColumns& columns,
                    const CombineSection& section, const float* out,
                    int64_t dim, float scale, int64_t begin, int64_t end,
                    float* parts) {
  const int64_t width = columns.width;
  parts += section.first_value;
  if (scale == 0) {
    std::memset(parts + begin * width, 0,
                (end - begin) * width * sizeof(float));
    return;
  }
  out += columns.column;
  for (int64_t k = begin; k < end; ++k) {
    const float* from = out + section.sample_ids[k] * dim;
    float* to = parts + k * width;
    for (int64_t j = 0; j < width; ++j) to[j] = from[j] * scale;
  }
}

TFDIST_CLONES
bool AscendingBelow(const int32_t* ids, int64_t count, int64_t limit) {
  if (count == 0) return true;
  bool ascending = ids[0] >= 0 && ids[count - 1] < limit;
  for (int64_t i = 1; i < count; ++i) ascending &= ids[i - 1] < ids[i];
  return ascending;
}

}  // namespace tfdist
