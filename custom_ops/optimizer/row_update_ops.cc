// SPDX-License-Identifier: Apache-2.0
//
// The ops of the row optimizers. All of them update a shard in place. Their
// inputs are
//   table            resource variable [num_rows, dim], float or bfloat16
//   slots            resource variables, float, of the shape of the table
//   rows [n]         local rows; duplicate rows are updated once, with the sum
//                    of their gradients
//   grads [n, dim]   gradient of each row
// scalar hyperparameters of dtype float64, and
//   rounding_seeds   seed for stochastic rounding of a bfloat16 table; without
//                    a seed, the table is rounded to nearest
// Rows are computed in float. If an input is invalid, nothing is written. Rows
// that are not in `rows` keep their weights and slots.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {
namespace {

namespace tf = ::tensorflow;
using tf::shape_inference::DimensionHandle;
using tf::shape_inference::InferenceContext;
using tf::shape_inference::ShapeHandle;

// Checks rows [n] and grads [n, dim]. Sets *num_rows to n.
absl::Status CheckRowGradients(InferenceContext* c, DimensionHandle* num_rows) {
  std::vector<ShapeHandle> rows;
  std::vector<ShapeHandle> grads;
  ShapeHandle checked;
  TF_RETURN_IF_ERROR(c->input("rows", &rows));
  TF_RETURN_IF_ERROR(c->input("grads", &grads));
  TF_RETURN_IF_ERROR(c->WithRank(rows[0], 1, &checked));
  TF_RETURN_IF_ERROR(c->WithRank(grads[0], 2, &checked));
  return c->Merge(c->Dim(rows[0], 0), c->Dim(grads[0], 0), num_rows);
}

absl::Status ApplyRowsShape(InferenceContext* c) {
  DimensionHandle num_rows;
  return CheckRowGradients(c, &num_rows);
}

absl::Status SumDuplicateRowsShape(InferenceContext* c) {
  DimensionHandle num_rows;
  TF_RETURN_IF_ERROR(CheckRowGradients(c, &num_rows));
  const DimensionHandle unique = c->UnknownDim();
  c->set_output(0, c->Vector(unique));
  c->set_output(1, c->Matrix(unique, c->Dim(c->input(1), 1)));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("Tfdist>ApplyRowSgd")
    .Input("table: resource")
    .Input("rows: int64")
    .Input("grads: T")
    .Input("learning_rate: double")
    .Input("rounding_seeds: num_seeds * int64")
    .Attr("num_seeds: int >= 0 = 0")
    .Attr("T: {float} = DT_FLOAT")
    .SetIsStateful()
    .SetShapeFn(ApplyRowsShape)
    .Doc("table[rows] -= learning_rate * grads.");

REGISTER_OP("Tfdist>ApplyRowMomentum")
    .Input("table: resource")
    .Input("velocity: resource")
    .Input("rows: int64")
    .Input("grads: T")
    .Input("learning_rate: double")
    .Input("momentum: double")
    .Input("rounding_seeds: num_seeds * int64")
    .Attr("nesterov: bool = false")
    .Attr("num_seeds: int >= 0 = 0")
    .Attr("T: {float} = DT_FLOAT")
    .SetIsStateful()
    .SetShapeFn(ApplyRowsShape)
    .Doc(
        "velocity[rows] = momentum * velocity[rows] - learning_rate * grads; "
        "table[rows] += velocity[rows], or with nesterov += momentum * "
        "velocity[rows] - learning_rate * grads.");

REGISTER_OP("Tfdist>ApplyRowAdagrad")
    .Input("table: resource")
    .Input("accumulator: resource")
    .Input("rows: int64")
    .Input("grads: T")
    .Input("learning_rate: double")
    .Input("epsilon: double")
    .Input("rounding_seeds: num_seeds * int64")
    .Attr("num_seeds: int >= 0 = 0")
    .Attr("T: {float} = DT_FLOAT")
    .SetIsStateful()
    .SetShapeFn(ApplyRowsShape)
    .Doc(
        "accumulator[rows] += grads^2; table[rows] -= learning_rate * grads "
        "/ sqrt(accumulator[rows] + epsilon).");

REGISTER_OP("Tfdist>ApplyRowWiseAdagrad")
    .Input("table: resource")
    .Input("accumulator: resource")
    .Input("rows: int64")
    .Input("grads: T")
    .Input("mean_squares: T")
    .Input("learning_rate: double")
    .Input("epsilon: double")
    .Input("rounding_seeds: num_seeds * int64")
    .Attr("num_seeds: int >= 0 = 0")
    .Attr("T: {float} = DT_FLOAT")
    .SetIsStateful()
    .SetShapeFn(ApplyRowsShape)
    .Doc(
        "Adagrad with one accumulator per row [num_rows], to which the mean of "
        "grads^2 of the row is added. If this rank has only some of the "
        "columns, mean_squares [n] are the means over the whole rows; "
        "otherwise mean_squares [0].");

REGISTER_OP("Tfdist>ApplyRowAdam")
    .Input("table: resource")
    .Input("momentum: resource")
    .Input("velocity: resource")
    .Input("velocity_hats: num_hats * resource")
    .Input("rows: int64")
    .Input("grads: T")
    .Input("learning_rate: double")
    .Input("beta_1: double")
    .Input("beta_2: double")
    .Input("epsilon: double")
    .Input("step: int64")
    .Input("rounding_seeds: num_seeds * int64")
    .Attr("num_hats: int >= 0 = 0")
    .Attr("all_rows: bool = false")
    .Attr("num_seeds: int >= 0 = 0")
    .Attr("T: {float} = DT_FLOAT")
    .SetIsStateful()
    .SetShapeFn(ApplyRowsShape)
    .Doc(
        "Adam on the given rows only. The bias correction uses step, the "
        "global number of updates including this one. With one "
        "velocity_hat, AMSGrad. If all_rows, the other rows are updated with a "
        "gradient of zero, in the same pass over the table.");

REGISTER_OP("Tfdist>ApplyRowFtrl")
    .Input("table: resource")
    .Input("accumulator: resource")
    .Input("linear: resource")
    .Input("rows: int64")
    .Input("grads: T")
    .Input("learning_rate: double")
    .Input("learning_rate_power: double")
    .Input("l1: double")
    .Input("l2: double")
    .Input("l2_shrinkage: double")
    .Input("beta: double")
    .Input("rounding_seeds: num_seeds * int64")
    .Attr("num_seeds: int >= 0 = 0")
    .Attr("T: {float} = DT_FLOAT")
    .SetIsStateful()
    .SetShapeFn(ApplyRowsShape)
    .Doc(
        "Follow the regularized leader (FTRL), as in Keras, on the given rows "
        "only. accumulator and linear are the state n and z of the "
        "algorithm.");

REGISTER_OP("Tfdist>SumDuplicateRows")
    .Input("rows: int64")
    .Input("grads: T")
    .Output("unique_rows: int64")
    .Output("sums: T")
    .Attr("T: {float} = DT_FLOAT")
    .SetShapeFn(SumDuplicateRowsShape)
    .Doc(
        "Returns the unique rows in ascending order, and the sum of the "
        "gradients of each. Strictly ascending rows are returned without a "
        "copy.");

REGISTER_OP("Tfdist>ScaleTable")
    .Input("table: resource")
    .Input("factor: double")
    .Input("rounding_seeds: num_seeds * int64")
    .Attr("num_seeds: int >= 0 = 0")
    .Attr("T: {float} = DT_FLOAT")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::NoOutputs)
    .Doc("table *= factor in place: decoupled weight decay without a copy.");

}  // namespace tfdist
