// SPDX-License-Identifier: Apache-2.0
#include "custom_ops/optimizer/shard_access.h"

#include <algorithm>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/common/huge_pages.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace tfdist {

namespace tf = ::tensorflow;

absl::Status ShardAccess::Lock(tf::OpKernelContext* ctx, int first,
                               int num_tables, int num_slots) {
  tables_ = num_tables;
  const int count = num_tables * (1 + num_slots);
  std::vector<decltype(variables_[0]->mu())> mutexes;
  for (int index = 0; index < count; ++index) {
    const tf::ResourceHandle& handle = tf::HandleFromInput(ctx, first + index);
    tf::core::RefCountPtr<tf::Var> variable;
    TF_RETURN_IF_ERROR(tf::LookupResource(ctx, handle, &variable));
    mutexes.push_back(variable->mu());
    names_.push_back(&handle.name());
    variables_.push_back(std::move(variable));
  }
  std::sort(mutexes.begin(), mutexes.end());
  if (std::adjacent_find(mutexes.begin(), mutexes.end()) != mutexes.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the table and its slots must be different variables; received the "
        "same variable twice for ",
        name(0)));
  }
  // Reserved, because a lock must not move while it is held.
  locks_.reserve(mutexes.size());
  for (auto* mutex : mutexes) locks_.emplace_back(*mutex);
  for (int index = 0; index < count; ++index) {
    TF_RETURN_IF_ERROR(Check(index));
  }
  return absl::OkStatus();
}

absl::Status ShardAccess::Check(int index) const {
  const tf::Tensor& tensor = *variables_[index]->tensor();
  if (!tensor.IsInitialized()) {
    return absl::FailedPreconditionError(
        absl::StrCat("variable ", *names_[index], " is not initialized"));
  }
  const bool slot = index >= tables_;
  const tf::DataType dtype = tensor.dtype();
  if (dtype == tf::DT_FLOAT || (!slot && dtype == tf::DT_BFLOAT16)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(slot ? "slot " : "table ", *names_[index],
                   slot ? " must be float32; received "
                        : " must be float32 or bfloat16; received ",
                   tf::DataTypeString(dtype)));
}

absl::Status CopyOnHost(const void* from, int64_t bytes, void* to) {
  std::memcpy(to, from, bytes);
  return absl::OkStatus();
}

absl::Status ShardAccess::CopyIfShared(tf::OpKernelContext* ctx,
                                       const CopyBytes& copy_bytes,
                                       tf::Var* variable) {
  tf::Tensor* values = variable->tensor();
  // In copy-on-read mode, no other tensor shares the buffer. Otherwise, a
  // reference count of one means that none does, and none can while the
  // variable is locked.
  if (variable->copy_on_read_mode.load() || values->RefCountIsOne()) {
    return absl::OkStatus();
  }
  tf::Tensor copy;
  TF_RETURN_IF_ERROR(
      ctx->allocate_temp(values->dtype(), values->shape(), &copy));
  TF_RETURN_IF_ERROR(
      copy_bytes(values->data(), values->TotalBytes(), copy.data()));
  *values = copy;
  variable->copy_on_read_mode.store(true);
  return absl::OkStatus();
}

absl::Status ShardAccess::PrepareToWrite(tf::OpKernelContext* ctx,
                                         const CopyBytes& copy_bytes) {
  for (auto& variable : variables_) {
    TF_RETURN_IF_ERROR(CopyIfShared(ctx, copy_bytes, variable.get()));
  }
  return absl::OkStatus();
}

absl::Status ShardAccess::PrepareToWriteRows(tf::OpKernelContext* ctx) {
  for (size_t i = 0; i < variables_.size(); ++i) {
    tf::Var* variable = variables_[i].get();
    std::vector<SharedSnapshot> sharing;
    for (SharedSnapshot& each : SnapshotsOf(variable)) {
      if (each->SharesBuffer()) sharing.push_back(std::move(each));
    }
    if (sharing.empty()) {
      TF_RETURN_IF_ERROR(CopyIfShared(ctx, CopyOnHost, variable));
      continue;
    }
    // Whether there are readers besides the snapshots shows when these do not
    // refer to the buffer. If there are, the snapshots keep the old buffer.
    const tf::Tensor* values = variable->tensor();
    const void* data = values->data();
    for (const SharedSnapshot& each : sharing) each->DropBuffer();
    const tf::Tensor before = values->RefCountIsOne() ? tf::Tensor() : *values;
    const absl::Status copied = CopyIfShared(ctx, CopyOnHost, variable);
    const bool in_place = values->data() == data;
    for (const SharedSnapshot& each : sharing) {
      each->SetBuffer(in_place ? *values : before);
      if (in_place) snapshots_.emplace_back(i % tables_, each);
    }
    TF_RETURN_IF_ERROR(copied);
  }
  return absl::OkStatus();
}

void ShardAccess::WillWrite(const int64_t* rows, int64_t size, int table) {
  for (const auto& [of, snapshot] : snapshots_) {
    if (of == table) snapshot->Keep(rows, size);
  }
}

void ShardAccess::UseHugePages() {
  for (auto& variable : variables_) {
    tf::Tensor* values = variable->tensor();
    ExchangeForHugePages(values->data(), values->TotalBytes());
  }
}

MatrixSize ShardAccess::TableSize() const {
  const int64_t size = tensor(0).NumElements();
  const int64_t rows = tensor(0).dims() == 0 ? 1 : tensor(0).dim_size(0);
  return size == 0 ? MatrixSize{0, 0} : MatrixSize{rows, size / rows};
}

RowBuffers ShardAccess::Buffers(int num_slots, const Rounding& rounding,
                                int table) const {
  RowBuffers buffers = {};
  buffers.rounding = rounding;
  void* data = variables_[table]->tensor()->data();
  if (tensor(0, table).dtype() == tf::DT_FLOAT) {
    buffers.table = static_cast<float*>(data);
  } else {
    buffers.bfloat16_table = static_cast<uint16_t*>(data);
  }
  for (int i = 0; i < num_slots; ++i) {
    void* slot = variables_[(1 + i) * tables_ + table]->tensor()->data();
    buffers.slots[i] = static_cast<float*>(slot);
  }
  return buffers;
}

absl::Status ReadRounding(tf::OpKernelContext* ctx, Rounding* rounding) {
  std::vector<Rounding> roundings;
  TF_RETURN_IF_ERROR(ReadRoundings(ctx, 1, &roundings));
  *rounding = roundings[0];
  return absl::OkStatus();
}

absl::Status ReadRoundings(tf::OpKernelContext* ctx, int num_tables,
                           std::vector<Rounding>* roundings) {
  tf::OpInputList seeds;
  TF_RETURN_IF_ERROR(ctx->input_list("rounding_seeds", &seeds));
  roundings->assign(num_tables, {});
  if (seeds.size() == 0) return absl::OkStatus();
  if (seeds.size() != num_tables) {
    return absl::InvalidArgumentError(
        absl::StrCat("rounding_seeds must be one scalar per table (",
                     num_tables, ") or none; received ", seeds.size()));
  }
  for (int i = 0; i < num_tables; ++i) {
    if (seeds[i].dims() != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("rounding_seeds must be scalars; received shape ",
                       seeds[i].shape().DebugString()));
    }
    (*roundings)[i] = {true,
                       static_cast<uint64_t>(seeds[i].scalar<int64_t>()())};
  }
  return absl::OkStatus();
}

}  // namespace tfdist
