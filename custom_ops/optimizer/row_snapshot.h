// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_SNAPSHOT_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_SNAPSHOT_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/lib/core/refcount.h"

namespace tfdist {

// The rows of a variable as they are at one point in time, while updates go on.
// Only rows that an update is about to write are copied (copy on write); all
// others are read from the buffer of the variable.
//
// The snapshot refers to the buffer. So an op of TensorFlow that writes to the
// variable copies the whole buffer first, and leaves the old one unchanged. Our
// updates write in place, and call Keep() with their rows before.
//
// All methods need exclusive access to the variable (Var::mu()).
class RowSnapshot {
 public:
  explicit RowSnapshot(tensorflow::core::RefCountPtr<tensorflow::Var> variable);

  // Copies the rows that are neither kept nor taken. They may be repeated.
  void Keep(const int64_t* rows, int64_t size);

  // Copies rows to `to`. Each row can be taken once.
  absl::Status Take(const int64_t* rows, int64_t size, char* to);

  // Whether the variable still has the buffer of the snapshot.
  bool SharesBuffer() const;

  // Gives up the reference to the buffer, and takes one again.
  void DropBuffer() { buffer_ = tensorflow::Tensor(); }
  void SetBuffer(const tensorflow::Tensor& buffer) { buffer_ = buffer; }

  tensorflow::Var* variable() const { return variable_.get(); }
  const tensorflow::TensorShape& shape() const { return shape_; }
  tensorflow::DataType dtype() const { return dtype_; }

 private:
  char* Kept(int32_t number) const;

  const tensorflow::core::RefCountPtr<tensorflow::Var> variable_;
  tensorflow::Tensor buffer_;
  const tensorflow::TensorShape shape_;
  const tensorflow::DataType dtype_;
  const int64_t row_bytes_;
  // Of each row: its number among the copies, from 1, or a value below. Zeros
  // from calloc take no time, and no memory until they are written.
  struct Free {
    void operator()(int32_t* numbers) const { std::free(numbers); }
  };
  std::unique_ptr<int32_t[], Free> numbers_;
  std::vector<std::unique_ptr<char[]>> blocks_;  // of kBlockRows copies each
  int32_t num_kept_ = 0;

  static constexpr int32_t kUnchanged = 0;
  static constexpr int32_t kTaken = -1;
  static constexpr int64_t kBlockRows = 1024;
};

using SharedSnapshot = std::shared_ptr<RowSnapshot>;

// The snapshots of a variable that have not ended. Fast if no variable has one.
std::vector<SharedSnapshot> SnapshotsOf(const tensorflow::Var* variable);

// Starts a snapshot of a variable in host memory, with a row for each index of
// its first dimension. The variable must not be locked.
absl::Status StartSnapshot(
    tensorflow::core::RefCountPtr<tensorflow::Var> variable,
    const std::string& name, SharedSnapshot* snapshot);

// Ends a snapshot. The variable must not be locked.
void EndSnapshot(const SharedSnapshot& snapshot);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_SNAPSHOT_H_
