// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_CODEC_ID_MESSAGES_H_
#define TFDIST_CUSTOM_OPS_CODEC_ID_MESSAGES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/codec/id_section.h"
#include "custom_ops/codec/message_header.h"
#include "custom_ops/codec/placement_plan.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// Common part of DecodeIds on CPU and GPU: reads the headers of the messages
// that this rank received, and allocates the outputs. The entries are read on
// the device that holds the tables.
class IdMessages {
 public:
  // One section of one message, and the position of its samples and entries in
  // the outputs.
  struct Part {
    int64_t source = 0;
    int64_t feature = 0;
    int64_t at = 0;  // offset of its first byte in the payload
    SectionReader reader;
    int64_t first_sample = 0;
    int64_t first_entry = 0;
  };

  IdMessages(const PlacementPlan& plan, int64_t rank)
      : plan_(plan), rank_(rank) {}

  // Reads inputs 0 and 1. Returns an error if another rank has sent one.
  absl::Status Read(tensorflow::OpKernelContext* ctx);

  // Allocates and fills served and samples, outputs 3 and 4.
  absl::Status WriteRanks(tensorflow::OpKernelContext* ctx) const;

  // Allocates row_splits, rows and weights, outputs 0 to 2.
  absl::Status AllocateEntries(tensorflow::OpKernelContext* ctx,
                               DecodedIds* to) const;

  // Ordered by rank, then feature.
  const std::vector<Part>& parts() const { return parts_; }
  int64_t entries() const { return entries_; }

  // Returns block b of a part, with its position in the payload and the
  // outputs.
  static IdBlock BlockOf(const Part& part, size_t b);
  uint64_t RowLimit(const Part& part) const {
    return plan_.features()[part.feature].RowLimit();
  }
  // Returns the error for a malformed part.
  absl::Status Malformed(const Part& part, IdError error) const {
    return Malformed(part.source, part.feature, Reason(error));
  }

 private:
  // The error of a section, or of the message header if `feature` is negative.
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

#endif  // TFDIST_CUSTOM_OPS_CODEC_ID_MESSAGES_H_
