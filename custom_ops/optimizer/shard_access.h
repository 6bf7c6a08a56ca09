// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_SHARD_ACCESS_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_SHARD_ACCESS_H_

#include <functional>
#include <string>
#include <vector>

#include "custom_ops/optimizer/row_update_functor.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/lib/core/refcount.h"
#include "tensorflow/core/platform/mutex.h"

namespace tfdist {

// Copies bytes in the memory of the buffers.
using CopyBytes =
    std::function<absl::Status(const void* from, int64_t bytes, void* to)>;
absl::Status CopyOnHost(const void* from, int64_t bytes, void* to);

// The dimensions of a table as a matrix, for a table of any shape.
struct MatrixSize {
  int64_t rows;
  int64_t dim;
};

// Exclusive access to the variables in the first resource inputs of a kernel: a
// table and its slots. The variables are locked during the life of this object.
// They are locked in the order of their addresses, so that two kernels with the
// same variables cannot deadlock.
class ShardAccess {
 public:
  // Looks up and locks inputs 0 to num_variables - 1. Each variable must be
  // initialized. The first is the table, of dtype float or bfloat16; the others
  // are slots, of dtype float.
  absl::Status Lock(tensorflow::OpKernelContext* ctx, int num_variables);

  // Makes the buffers safe to write in place. Call it after all inputs have
  // been checked. If a buffer still has another reader, replaces it by a copy.
  // Later reads of the variable copy it instead.
  absl::Status PrepareToWrite(tensorflow::OpKernelContext* ctx,
                              const CopyBytes& copy = CopyOnHost);

  // Replaces the pages of the buffers by huge pages, at the first update.
  void UseHugePages();

  const tensorflow::Tensor& tensor(int index) const {
    return *variables_[index]->tensor();
  }
  // Returns 0 rows for a table without elements.
  MatrixSize TableSize() const;
  // Returns the buffers of the table and of num_slots slots, for writing.
  RowBuffers Buffers(int num_slots, const Rounding& rounding) const;
  const std::string& name(int index) const { return names_[index]; }

 private:
  // The references must outlive the locks. Members are destroyed in reverse
  // order.
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables_;
  std::vector<std::string> names_;
  std::vector<tensorflow::mutex_lock> locks_;
};

// Reads the rounding of a bfloat16 table: stochastic with the seed in the input
// list "rounding_seeds", or to nearest if the list is empty.
absl::Status ReadRounding(tensorflow::OpKernelContext* ctx, Rounding* rounding);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_SHARD_ACCESS_H_
