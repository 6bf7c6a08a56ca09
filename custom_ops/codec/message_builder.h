// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_MESSAGE_BUILDER_H_
#define TFDIST_CUSTOM_OPS_CODEC_MESSAGE_BUILDER_H_

#include <cstdint>
#include <vector>

#include "custom_ops/codec/entry_builder.h"
#include "custom_ops/codec/id_section.h"
#include "custom_ops/codec/message_header.h"
#include "custom_ops/codec/placement_plan.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tfdist {

// The entries of one feature, for consecutive ranges of samples.
struct FeatureEntries {
  std::vector<EntryBuilder> ranges;
  bool unique = false;
  bool weighted = false;
};

// Builds the messages to all ranks from the entries of all features. There is
// one section per feature and row part. Each rank that holds a cell of this row
// part gets a copy of the section.
class MessageBuilder {
 public:
  MessageBuilder(const PlacementPlan& plan,
                 const std::vector<FeatureEntries>& entries,
                 const MessageHeader& header, bool in_blocks,
                 tensorflow::thread::ThreadPool* pool);

  // Chooses the codes of all sections. Call it once, before the outputs are
  // written.
  void Code();

  // Allocates and fills payload and send_splits, outputs 0 and 1.
  absl::Status WritePayload(tensorflow::OpKernelContext* ctx) const;

  // Allocates and fills sample_ids and sample_splits, outputs 2 and 3.
  absl::Status WriteSamples(tensorflow::OpKernelContext* ctx) const;

 private:
  struct Section {
    size_t feature = 0;
    int64_t part = 0;
    int64_t bytes = 0;
    SectionWriter writer;
    std::vector<int32_t> sample_ids;
  };

  void CodeSection(Section* section) const;
  // Runs f(section) for all sections, on the pool.
  template <typename F>
  void ForAllSections(F f) const;
  static constexpr int64_t kNoSection = -1;
  // Returns the index of the section of a feature that a rank gets, or
  // kNoSection.
  int64_t SectionOf(size_t feature, int64_t rank) const;

  const PlacementPlan& plan_;
  const std::vector<FeatureEntries>& entries_;
  const MessageHeader& header_;
  const bool in_blocks_;
  tensorflow::thread::ThreadPool* pool_;
  std::vector<Section> sections_;
  std::vector<int64_t> first_section_;  // by feature
  int64_t cost_ = 0;                    // mean cost of a section, in ns
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_CODEC_MESSAGE_BUILDER_H_
