// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_LOOKUP_READ_TABLES_H_
#define TFDIST_CUSTOM_OPS_LOOKUP_READ_TABLES_H_

#include <algorithm>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {

// The tables of a kernel, locked for reading during the life of this object, so
// that no update of their rows runs meanwhile.
class ReadTables {
 public:
  absl::Status Lock(tensorflow::OpKernelContext* ctx, int count) {
    variables_.resize(count);
    std::vector<tensorflow::mutex*> mutexes;
    for (int i = 0; i < count; ++i) {
      TF_RETURN_IF_ERROR(tensorflow::LookupResource(
          ctx, tensorflow::HandleFromInput(ctx, i), &variables_[i]));
      mutexes.push_back(variables_[i]->mu());
    }
    // Locks each mutex once, in the order of addresses, as kernels that write
    // do, to prevent deadlocks.
    std::sort(mutexes.begin(), mutexes.end());
    mutexes.erase(std::unique(mutexes.begin(), mutexes.end()), mutexes.end());
    // Reserved, because a lock must not move while it is held.
    locks_.reserve(mutexes.size());
    for (auto* mutex : mutexes) locks_.emplace_back(*mutex);
    return Check();
  }

  const tensorflow::Tensor& operator[](int64_t i) const {
    return *variables_[i]->tensor();
  }

  std::vector<int64_t> Widths() const {
    std::vector<int64_t> widths;
    for (const auto& variable : variables_) {
      widths.push_back(variable->tensor()->dim_size(1));
    }
    return widths;
  }

 private:
  absl::Status Check() const {
    for (const auto& variable : variables_) {
      const tensorflow::Tensor& table = *variable->tensor();
      if (table.dims() != 2 || (table.dtype() != tensorflow::DT_FLOAT &&
                                table.dtype() != tensorflow::DT_BFLOAT16)) {
        return tensorflow::errors::InvalidArgument(
            "A table must be a matrix of float or bfloat16. Received: ",
            table.DebugString(0));
      }
    }
    return absl::OkStatus();
  }

  // The references must outlive the locks. Members are destroyed in reverse
  // order.
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables_;
  std::vector<tensorflow::tf_shared_lock> locks_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_LOOKUP_READ_TABLES_H_
