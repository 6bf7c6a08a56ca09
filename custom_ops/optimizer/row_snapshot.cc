// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/optimizer/row_snapshot.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/platform/mutex.h"

namespace tfdist {

namespace tf = ::tensorflow;

RowSnapshot::RowSnapshot(tf::core::RefCountPtr<tf::Var> variable)
    : variable_(std::move(variable)),
      buffer_(*variable_->tensor()),
      shape_(buffer_.shape()),
      dtype_(buffer_.dtype()),
      row_bytes_(buffer_.TotalBytes() /
                 std::max<int64_t>(1, shape_.dim_size(0))),
      numbers_(static_cast<int32_t*>(
          std::calloc(shape_.dim_size(0) + 1, sizeof(int32_t)))) {}

char* RowSnapshot::Kept(int32_t number) const {
  const int64_t place = number - 1;
  return blocks_[place / kBlockRows].get() + place % kBlockRows * row_bytes_;
}

void RowSnapshot::Keep(const int64_t* rows, int64_t size) {
  const char* from = static_cast<const char*>(buffer_.data());
  for (int64_t i = 0; i < size; ++i) {
    int32_t& number = numbers_[rows[i]];
    if (number != kUnchanged) continue;
    if (num_kept_ % kBlockRows == 0) {
      blocks_.emplace_back(new char[kBlockRows * row_bytes_]);
    }
    number = ++num_kept_;
    std::memcpy(Kept(number), from + rows[i] * row_bytes_, row_bytes_);
  }
}

absl::Status RowSnapshot::Take(const int64_t* rows, int64_t size, char* to) {
  const char* from = static_cast<const char*>(buffer_.data());
  for (int64_t i = 0; i < size; ++i, to += row_bytes_) {
    const int64_t row = rows[i];
    if (row < 0 || row >= shape_.dim_size(0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("row ", row, " is outside of a snapshot of shape ",
                       shape_.DebugString()));
    }
    if (numbers_[row] == kTaken) {
      return absl::FailedPreconditionError(absl::StrCat(
          "row ", row, " has already been taken from the snapshot"));
    }
    const char* values = numbers_[row] == kUnchanged ? from + row * row_bytes_
                                                     : Kept(numbers_[row]);
    std::memcpy(to, values, row_bytes_);
    numbers_[row] = kTaken;
  }
  return absl::OkStatus();
}

bool RowSnapshot::SharesBuffer() const {
  return variable_->tensor()->data() == buffer_.data();
}

namespace {

// All snapshots of the process that have not ended.
struct Registry {
  std::atomic<int> count{0};
  std::mutex mutex;
  std::vector<SharedSnapshot> snapshots;
};

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

}  // namespace

std::vector<SharedSnapshot> SnapshotsOf(const tf::Var* variable) {
  std::vector<SharedSnapshot> found;
  Registry& registry = TheRegistry();
  if (registry.count.load() == 0) return found;
  const std::lock_guard<std::mutex> lock(registry.mutex);
  for (const SharedSnapshot& each : registry.snapshots) {
    if (each->variable() == variable) found.push_back(each);
  }
  return found;
}

absl::Status StartSnapshot(tf::core::RefCountPtr<tf::Var> variable,
                           const std::string& name, SharedSnapshot* snapshot) {
  tf::Var* var = variable.get();
  const tf::mutex_lock lock(*var->mu());
  const tf::Tensor& values = *var->tensor();
  if (!values.IsInitialized()) {
    return absl::FailedPreconditionError(
        absl::StrCat("variable ", name, " is not initialized"));
  }
  if (values.dims() == 0 || !tf::DataTypeCanUseMemcpy(values.dtype()) ||
      values.dim_size(0) > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a snapshot needs at least one dimension, at most 2^31 rows and "
        "numbers; received variable ",
        name, " of shape ", values.shape().DebugString(), " and dtype ",
        tf::DataTypeString(values.dtype())));
  }
  // Sparse ops of TensorFlow copy a buffer that has another reader only if the
  // variable is not in this mode.
  var->copy_on_read_mode.store(false);
  *snapshot = std::make_shared<RowSnapshot>(std::move(variable));
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> registering(registry.mutex);
  registry.snapshots.push_back(*snapshot);
  registry.count.store(static_cast<int>(registry.snapshots.size()));
  return absl::OkStatus();
}

void EndSnapshot(const SharedSnapshot& snapshot) {
  const tf::mutex_lock lock(*snapshot->variable()->mu());
  // Before it is removed: an update must not see a reader that it does not
  // know, since it would then copy the buffer.
  snapshot->DropBuffer();
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> removing(registry.mutex);
  auto& all = registry.snapshots;
  all.erase(std::remove(all.begin(), all.end(), snapshot), all.end());
  registry.count.store(static_cast<int>(all.size()));
}

}  // namespace tfdist
