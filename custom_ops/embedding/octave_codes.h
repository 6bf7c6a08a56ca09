// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_EMBEDDING_OCTAVE_CODES_H_
#define TFDIST_EMBEDDING_OCTAVE_CODES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "bit_stream.h"
#include "radix_sort.h"

namespace tfdist {

// The octave of a position: 0 for 0, 1 for 1 and 2, 2 for 3 to 6, and so on.
// Popularity changes by a factor of about two within one.
inline int Octave(uint64_t position) {
  return 63 - __builtin_clzll(position + 1);
}

// Rice codes for numbers whose size depends on the octave of a position: one
// parameter per octave. The parameters precede the numbers; they change slowly
// from octave to octave and are coded as differences, a bit or two each.
class OctaveCodes {
 public:
  static constexpr int kMaxOctaves = 20;

  // Chooses the parameters for values[i] - base in octaves_of[i] < octaves.
  template <typename T>
  void Choose(const T* values, uint64_t base, const uint8_t* octaves_of,
              size_t count, int octaves) {
    octaves_ = octaves;
    uint64_t sums[kMaxOctaves] = {};
    uint64_t counts[kMaxOctaves] = {};
    for (size_t i = 0; i < count; ++i) {
      sums[octaves_of[i]] += values[i] - base;
      ++counts[octaves_of[i]];
    }
    bits_ = 0;
    int previous = 0;
    for (int octave = 0; octave < octaves_; ++octave) {
      k_[octave] =
          counts[octave] == 0 ? previous : BestK(sums[octave], counts[octave]);
      bits_ += Difference(k_[octave], previous) + 1;
      bits_ += counts[octave] * (k_[octave] + 1);
      previous = k_[octave];
    }
    for (size_t i = 0; i < count; ++i) {
      bits_ += (values[i] - base) >> k_[octaves_of[i]];
    }
  }

  // Of the parameters and all numbers.
  uint64_t bits() const { return bits_; }
  int k(int octave) const { return k_[octave]; }

  void PutParameters(BitWriter* writer) const {
    int previous = 0;
    for (int octave = 0; octave < octaves_; ++octave) {
      writer->PutRice(Difference(k_[octave], previous), 0);
      previous = k_[octave];
    }
  }

  // Returns false if a parameter is out of range.
  bool GetParameters(BitReader* reader, int octaves) {
    octaves_ = octaves;
    int64_t k = 0;
    for (int octave = 0; octave < octaves_; ++octave) {
      const uint64_t difference = reader->GetRice(0);
      if (difference > 2 * RiceCode::kMaxK) return false;
      const int64_t half = (difference + 1) / 2;
      k += difference % 2 == 1 ? half : -half;
      if (k < 0 || k > RiceCode::kMaxK) return false;
      k_[octave] = static_cast<int>(k);
    }
    return true;
  }

 private:
  // The best parameter for a geometric distribution of this mean: it changes
  // where the golden ratio says (Kiely 2004, "Selecting the Golomb parameter in
  // Rice coding").
  static int BestK(uint64_t sum, uint64_t count) {
    constexpr double kLogOfGoldenRatio = 0.4812118;
    const double mean = static_cast<double>(sum) / static_cast<double>(count);
    const auto scale = static_cast<uint64_t>(kLogOfGoldenRatio * (mean + 0.5));
    return std::min(BitWidth(scale), RiceCode::kMaxK);
  }

  // 0, +1, -1, +2, ... as 0, 1, 2, 3, ...
  static uint64_t Difference(int k, int previous) {
    return k > previous ? 2 * (k - previous) - 1 : 2 * (previous - k);
  }

  int octaves_ = 0;
  int k_[kMaxOctaves] = {};
  uint64_t bits_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_EMBEDDING_OCTAVE_CODES_H_
