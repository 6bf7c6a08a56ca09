// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_UPDATE_INPUTS_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_UPDATE_INPUTS_H_

#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/optimizer/row_order.h"
#include "custom_ops/optimizer/row_update_functor.h"
#include "custom_ops/optimizer/rule_inputs.h"
#include "custom_ops/optimizer/shard_access.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

// Returns an error if a slot of a table, which is a matrix, has another shape
// than the rule needs.
template <typename Rule>
absl::Status CheckSlots(const std::string& op, int num_slots,
                        const ShardAccess& shard, int table) {
  const tf::TensorShape& shape = shard.tensor(0, table).shape();
  const tf::TensorShape slot_shape =
      std::is_same<Rule, RowWiseAdagradRule>::value
          ? tf::TensorShape({shape.dim_size(0)})
          : shape;
  for (int i = 1; i <= num_slots; ++i) {
    if (shard.tensor(i, table).shape() != slot_shape) {
      return absl::InvalidArgumentError(
          absl::StrCat(op, ": slot ", shard.name(i, table), " must have shape ",
                       slot_shape.DebugString(), "; received ",
                       shard.tensor(i, table).shape().DebugString()));
    }
  }
  return absl::OkStatus();
}

// The checked inputs of an update: the shapes match, and the rows are within
// the table. Read() locks the table and its slots. The rows must be in host
// memory.
template <typename Rule>
struct UpdateInputs {
  Rule rule;
  Rounding rounding;
  RowBatch batch;
  int64_t num_rows;  // of the table
  bool ascending;    // false: rows are duplicate or not sorted

  absl::Status Read(tf::OpKernelContext* ctx, const std::string& op,
                    RuleInputs<Rule>* inputs, ShardAccess* shard) {
    const tf::Tensor* rows;
    const tf::Tensor* grads;
    TF_RETURN_IF_ERROR(ctx->input("rows", &rows));
    TF_RETURN_IF_ERROR(ctx->input("grads", &grads));
    TF_RETURN_IF_ERROR(inputs->Read(ctx, &rule));
    TF_RETURN_IF_ERROR(ReadMeans(ctx, rows->NumElements(), &rule));
    TF_RETURN_IF_ERROR(ReadRounding(ctx, &rounding));
    TF_RETURN_IF_ERROR(shard->Lock(ctx, inputs->NumSlots()));
    TF_RETURN_IF_ERROR(CheckGradients(op, *shard, *rows, *grads));
    TF_RETURN_IF_ERROR(CheckSlots<Rule>(op, inputs->NumSlots(), *shard, 0));
    num_rows = shard->tensor(0).dim_size(0);
    batch = {static_cast<const int64_t*>(rows->data()),
             static_cast<const float*>(grads->data()), rows->NumElements(),
             grads->dim_size(1)};
    TF_RETURN_IF_ERROR(
        CheckRowsInside(op, batch.rows, batch.size, num_rows, shard->name(0)));
    ascending = StrictlyAscending(batch.rows, batch.size);
    if (ascending) return absl::OkStatus();
    if (HasMeans(rule)) {
      return absl::InvalidArgumentError(
          absl::StrCat(op,
                       ": rows must be strictly ascending when mean_squares "
                       "are given"));
    }
    return CheckSortable(op, batch.size);
  }

 private:
  static absl::Status CheckGradients(const std::string& op,
                                     const ShardAccess& shard,
                                     const tf::Tensor& rows,
                                     const tf::Tensor& grads) {
    const tf::TensorShape& table = shard.tensor(0).shape();
    if (table.dims() != 2 || rows.dims() != 1 || grads.dims() != 2 ||
        grads.dim_size(0) != rows.dim_size(0) ||
        grads.dim_size(1) != table.dim_size(1)) {
      return absl::InvalidArgumentError(absl::StrCat(
          op,
          ": rows [n] and grads [n, dim] must fit the table [rows, "
          "dim]; received rows ",
          rows.shape().DebugString(), ", grads ", grads.shape().DebugString(),
          ", table ", table.DebugString(), " (", shard.name(0), ")"));
    }
    return absl::OkStatus();
  }

  static absl::Status ReadMeans(tf::OpKernelContext* ctx, int64_t num_rows,
                                RowWiseAdagradRule* rule) {
    const tf::Tensor* means;
    TF_RETURN_IF_ERROR(ctx->input("mean_squares", &means));
    if (means->dims() != 1 ||
        (means->dim_size(0) != 0 && means->dim_size(0) != num_rows)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "mean_squares must be empty or have one value per row (", num_rows,
          "); received shape ", means->shape().DebugString()));
    }
    if (means->dim_size(0) > 0) {
      rule->mean_squares = means->flat<float>().data();
    }
    return absl::OkStatus();
  }
  template <typename Other>
  static absl::Status ReadMeans(tf::OpKernelContext*, int64_t, Other*) {
    return absl::OkStatus();
  }

  static bool HasMeans(const RowWiseAdagradRule& rule) {
    return rule.mean_squares != nullptr;
  }
  template <typename Other>
  static bool HasMeans(const Other&) {
    return false;
  }
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_UPDATE_INPUTS_H_
