// SPDX-License-Identifier: Apache-2.0
//
// Reads the rule of an op from its inputs and attributes.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_RULE_INPUTS_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_RULE_INPUTS_H_

#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/optimizer/row_update_functor.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfdist {

namespace tf = ::tensorflow;

// Reads an input after the variables, rows and grads. These inputs are scalars
// of dtype float64, so that 1 - beta_2 has the precision of its float32 result.
inline absl::Status Scalar(tf::OpKernelContext* ctx, const char* name,
                           double* value) {
  const tf::Tensor* tensor;
  TF_RETURN_IF_ERROR(ctx->input(name, &tensor));
  if (tensor->dims() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " must be a scalar; received ", tensor->shape().DebugString()));
  }
  *value = tensor->scalar<double>()();
  return absl::OkStatus();
}

inline absl::Status Scalar(tf::OpKernelContext* ctx, const char* name,
                           float* value) {
  double wide = 0;
  TF_RETURN_IF_ERROR(Scalar(ctx, name, &wide));
  *value = static_cast<float>(wide);
  return absl::OkStatus();
}

// The differences between the ops other than their rules. The constructor reads
// the attributes of the kernel once. Read() sets the rule from the inputs in
// each step.
template <typename Rule>
struct RuleInputs;

template <>
struct RuleInputs<SgdRule> {
  explicit RuleInputs(tf::OpKernelConstruction*) {}
  int NumSlots() const { return 0; }
  absl::Status Read(tf::OpKernelContext* ctx, SgdRule* rule) {
    return Scalar(ctx, "learning_rate", &rule->learning_rate);
  }
};

template <>
struct RuleInputs<MomentumRule> {
  explicit RuleInputs(tf::OpKernelConstruction* ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nesterov", &nesterov));
  }
  int NumSlots() const { return 1; }
  absl::Status Read(tf::OpKernelContext* ctx, MomentumRule* rule) {
    rule->nesterov = nesterov;
    TF_RETURN_IF_ERROR(Scalar(ctx, "momentum", &rule->momentum));
    return Scalar(ctx, "learning_rate", &rule->learning_rate);
  }
  bool nesterov;
};

template <>
struct RuleInputs<AdagradRule> {
  explicit RuleInputs(tf::OpKernelConstruction*) {}
  int NumSlots() const { return 1; }
  absl::Status Read(tf::OpKernelContext* ctx, AdagradRule* rule) {
    TF_RETURN_IF_ERROR(Scalar(ctx, "epsilon", &rule->epsilon));
    return Scalar(ctx, "learning_rate", &rule->learning_rate);
  }
};

template <>
struct RuleInputs<RowWiseAdagradRule> {
  explicit RuleInputs(tf::OpKernelConstruction*) {}
  int NumSlots() const { return 1; }
  absl::Status Read(tf::OpKernelContext* ctx, RowWiseAdagradRule* rule) {
    rule->mean_squares = nullptr;
    TF_RETURN_IF_ERROR(Scalar(ctx, "epsilon", &rule->epsilon));
    return Scalar(ctx, "learning_rate", &rule->learning_rate);
  }
};

template <>
struct RuleInputs<AdamRule> {
  explicit RuleInputs(tf::OpKernelConstruction* ctx) {
    int num_hats = 0;
    int tables = 1;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_hats", &num_hats));
    if (ctx->HasAttr("N")) OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &tables));
    OP_REQUIRES(ctx, num_hats == 0 || num_hats == tables,
                absl::InvalidArgumentError(
                    absl::StrCat("velocity_hats must be one per table (",
                                 tables, ") or none; received ", num_hats)));
    amsgrad = num_hats > 0;
    if (ctx->HasAttr("all_rows")) {
      OP_REQUIRES_OK(ctx, ctx->GetAttr("all_rows", &all_rows));
    }
  }
  int NumSlots() const { return amsgrad ? 3 : 2; }
  absl::Status Read(tf::OpKernelContext* ctx, AdamRule* rule) {
    double learning_rate = 0;
    double beta_1 = 0;
    double beta_2 = 0;
    TF_RETURN_IF_ERROR(Scalar(ctx, "learning_rate", &learning_rate));
    TF_RETURN_IF_ERROR(Scalar(ctx, "beta_1", &beta_1));
    TF_RETURN_IF_ERROR(Scalar(ctx, "beta_2", &beta_2));
    TF_RETURN_IF_ERROR(Scalar(ctx, "epsilon", &rule->epsilon));
    const tf::Tensor* step;
    TF_RETURN_IF_ERROR(ctx->input("step", &step));
    if (step->dims() != 0 || step->scalar<int64_t>()() < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("step must be a scalar counting from 1; received ",
                       step->SummarizeValue(1)));
    }
    const auto count = static_cast<double>(step->scalar<int64_t>()());
    rule->alpha = static_cast<float>(learning_rate *
                                     std::sqrt(1 - std::pow(beta_2, count)) /
                                     (1 - std::pow(beta_1, count)));
    rule->one_minus_beta_1 = static_cast<float>(1 - beta_1);
    rule->one_minus_beta_2 = static_cast<float>(1 - beta_2);
    rule->amsgrad = amsgrad;
    return absl::OkStatus();
  }
  bool amsgrad = false;
  bool all_rows = false;
};

template <>
struct RuleInputs<FtrlRule> {
  explicit RuleInputs(tf::OpKernelConstruction*) {}
  int NumSlots() const { return 2; }
  absl::Status Read(tf::OpKernelContext* ctx, FtrlRule* rule) {
    double learning_rate = 0;
    double power = 0;
    double l2 = 0;
    double l2_shrinkage = 0;
    double beta = 0;
    TF_RETURN_IF_ERROR(Scalar(ctx, "learning_rate", &learning_rate));
    TF_RETURN_IF_ERROR(Scalar(ctx, "learning_rate_power", &power));
    TF_RETURN_IF_ERROR(Scalar(ctx, "l1", &rule->l1));
    TF_RETURN_IF_ERROR(Scalar(ctx, "l2", &l2));
    TF_RETURN_IF_ERROR(Scalar(ctx, "l2_shrinkage", &l2_shrinkage));
    TF_RETURN_IF_ERROR(Scalar(ctx, "beta", &beta));
    rule->inverse_learning_rate = static_cast<float>(1 / learning_rate);
    rule->power = static_cast<float>(-power);
    rule->twice_l2 = static_cast<float>(2 * l2 + beta / learning_rate);
    rule->twice_l2_shrinkage = static_cast<float>(2 * l2_shrinkage);
    return absl::OkStatus();
  }
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_RULE_INPUTS_H_
