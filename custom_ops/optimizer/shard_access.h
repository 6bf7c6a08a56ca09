// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_SHARD_ACCESS_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_SHARD_ACCESS_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/optimizer/row_snapshot.h"
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

// Exclusive access to variables in the resource inputs of a kernel: tables and
// their slots. The variables are locked during the life of this object. They
// are locked in the order of their addresses, so that two kernels with the same
// variables cannot deadlock.
class ShardAccess {
 public:
  // Looks up and locks inputs 0 to num_slots: a table, then its slots. Each
  // variable must be initialized. The table is of dtype float or bfloat16, the
  // slots are of dtype float.
  absl::Status Lock(tensorflow::OpKernelContext* ctx, int num_slots) {
    return Lock(ctx, 0, 1, num_slots);
  }
  // The same for several tables. The inputs from `first` on are the tables,
  // then slot 0 of each table, then slot 1 of each table, and so on.
  absl::Status Lock(tensorflow::OpKernelContext* ctx, int first, int num_tables,
                    int num_slots);

  // Makes the buffers safe to write in place. Call it after all inputs have
  // been checked. If a buffer still has another reader, replaces it by a copy.
  // Later reads of the variable copy it instead.
  absl::Status PrepareToWrite(tensorflow::OpKernelContext* ctx,
                              const CopyBytes& copy = CopyOnHost);

  // The same where only rows are written that WillWrite() receives first: a
  // buffer of which there is a snapshot is not copied, but these rows are.
  absl::Status PrepareToWriteRows(tensorflow::OpKernelContext* ctx);
  // Call it before rows of a table and of its slots are written. The rows must
  // be within the table, and may be repeated.
  void WillWrite(const int64_t* rows, int64_t size, int table = 0);

  // Replaces the pages of the buffers by huge pages, at the first update.
  void UseHugePages();

  // Returns table `table` for index 0, and its slot `index - 1` for others.
  const tensorflow::Tensor& tensor(int index, int table = 0) const {
    return *variables_[index * tables_ + table]->tensor();
  }
  // Returns 0 rows for a table without elements.
  MatrixSize TableSize() const;
  // Returns the buffers of a table and of num_slots slots, for writing.
  RowBuffers Buffers(int num_slots, const Rounding& rounding,
                     int table = 0) const;
  const std::string& name(int index, int table = 0) const {
    return *names_[index * tables_ + table];
  }

 private:
  absl::Status Check(int index) const;
  // Copies the buffer of a variable if it has another reader.
  absl::Status CopyIfShared(tensorflow::OpKernelContext* ctx,
                            const CopyBytes& copy, tensorflow::Var* variable);

  int tables_ = 1;
  // The references must outlive the locks. Members are destroyed in reverse
  // order.
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables_;
  std::vector<const std::string*> names_;  // of the inputs' handles
  std::vector<tensorflow::mutex_lock> locks_;
  // Snapshots of buffers that are written in place, and their tables.
  std::vector<std::pair<int, SharedSnapshot>> snapshots_;
};

// Reads the rounding of a bfloat16 table: stochastic with the seed in the input
// list "rounding_seeds", or to nearest if the list is empty.
absl::Status ReadRounding(tensorflow::OpKernelContext* ctx, Rounding* rounding);

// The same for each of several tables.
absl::Status ReadRoundings(tensorflow::OpKernelContext* ctx, int num_tables,
                           std::vector<Rounding>* roundings);

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_SHARD_ACCESS_H_
