// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_EMBEDDING_ID_MESSAGES_H_
#define TFDIST_CUSTOM_OPS_EMBEDDING_ID_MESSAGES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/embedding/id_section.h"
#include "custom_ops/embedding/message_header.h"
#include "custom_ops/embedding/placement_plan.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// DecodeIds but for the entries, which are read where the tables lie: the
// headers of what all ranks have sent to one, and where the entries go.
class IdMessages {
 public:
  // One section of one message, and where its samples and entries go.
  struct Part {
    int64_t source = 0;
    int64_t feature = 0;
    int64_t at = 0;  // its first byte in the payload
    SectionReader reader;
    int64_t first_sample = 0;
    int64_t first_entry = 0;
  };

  IdMessages(const PlacementPlan& plan, int64_t rank)
      : plan_(plan), rank_(rank) {}

  // Reads inputs 0 and 1. An error of another rank is an error here.
  absl::Status Read(tensorflow::OpKernelContext* ctx);

  // Allocates and fills served and samples, outputs 3 and 4.
  absl::Status WriteRanks(tensorflow::OpKernelContext* ctx) const;

  // Allocates row_splits, rows and weights, outputs 0 to 2.
  absl::Status AllocateEntries(tensorflow::OpKernelContext* ctx,
                               DecodedIds* to) const;

  // By rank, then feature.
  const std::vector<Part>& parts() const { return parts_; }
  int64_t entries() const { return entries_; }

  // Block b of a part, with its place in payload and outputs.
  static IdBlock BlockOf(const Part& part, size_t b);
  uint64_t RowLimit(const Part& part) const {
    return plan_.features()[part.feature].RowLimit();
  }
  // What is wrong with a part.
  absl::Status Malformed(const Part& part, IdError error) const {
    return Malformed(part.source, part.feature, Reason(error));
  }

 private:
  // Of one message's header when `feature` is negative, else of one section.
  absl::Status Malformed(int64_t source, int64_t feature,
                         const char* reason) const;
  absl::Status ReadMessage(int64_t source, const uint8_t* payload,
                           HeaderReader* message);
  absl::Status FirstBadId() const;

  const PlacementPlan& plan_;
  const int64_t rank_;
  std::vector<MessageHeader> headers_;
  std::vector<Part> parts_;
  int64_t samples_ = 0;
  int64_t entries_ = 0;
  bool weighted_ = false;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_EMBEDDING_ID_MESSAGES_H_
