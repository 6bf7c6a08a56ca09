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

// Copies bytes where the buffers are.
using CopyBytes =
    std::function<absl::Status(const void* from, int64_t bytes, void* to)>;
absl::Status CopyOnHost(const void* from, int64_t bytes, void* to);

// The table as a matrix, whatever its shape.
struct MatrixSize {
  int64_t rows;
  int64_t dim;
};

// Exclusive access to the variables in the first resource inputs of a kernel:
// a table and its slots. Locked while this object lives, in address order so
// that two kernels sharing variables cannot deadlock.
class ShardAccess {
 public:
  // Looks up and locks inputs 0 to num_variables - 1. Each must be initialized,
  // the first, the table, with values of dtype float or bfloat16, the slots
  // with float.
  absl::Status Lock(tensorflow::OpKernelContext* ctx, int num_variables);

  // Makes the buffers safe to write in place. Call it once every input has
  // been checked: it copies a buffer that somebody else still reads, once,
  // and makes later reads of that variable copy instead.
  absl::Status PrepareToWrite(tensorflow::OpKernelContext* ctx,
                              const CopyBytes& copy = CopyOnHost);

  // Exchanges the pages of the buffers for huge ones: once, at the first
  // update.
  void UseHugePages();

  const tensorflow::Tensor& tensor(int index) const {
    return *variables_[index]->tensor();
  }
  // No rows if it has no elements.
  MatrixSize TableSize() const;
  // The values of num_slots slots and of the table, to write.
  RowBuffers Buffers(int num_slots, const Rounding& rounding) const;
  const std::string& name(int index) const { return names_[index]; }

 private:
  // The references outlive the locks: members are destroyed last to first.
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables_;
  std::vector<std::string> names_;
  std::vector<tensorflow::mutex_lock> locks_;
};

// The rounding of a bfloat16 table: at random with the seed in the input list
// "rounding_seeds", to nearest if that is empty.
absl::Status ReadRounding(tensorflow::OpKernelContext* ctx, Rounding* rounding);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_SHARD_ACCESS_H_
