# SPDX-License-Identifier: Apache-2.0
"""Adagrad with one accumulator per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.collectives.sums import sum_over_ranks
from tfdist_ext.marks import shard_spec
from tfdist_ext.ops import optimizer_ops
from tfdist_ext.optimizers.kernels import has_kernel
from tfdist_ext.optimizers.kernels import is_bfloat16_table
from tfdist_ext.optimizers.row_optimizer import RowOptimizer


@tf.keras.utils.register_keras_serializable(package="tfdist_ext")
class RowWiseAdagrad(RowOptimizer, tf.keras.optimizers.Adagrad):
    """Adagrad that keeps one accumulator per row of a matrix.

    A table `[rows, dim]` needs a slot of `rows` values instead of
    `rows * dim`. In each step, for every row r with gradient g:

        a[r] += mean(g ** 2)
        w[r] -= learning_rate * g / sqrt(a[r] + epsilon)

    The accumulator is FBGEMM's, the place of epsilon Keras's. Matrices with
    dense gradients follow the same rule, a row being an index of axis 0;
    variables of any other rank (biases) follow ordinary Adagrad. Takes the
    arguments of `keras.optimizers.Adagrad`, with the same defaults.

    Where the columns of a table are spread over the ranks, the mean is over
    all of them and costs one exchange of a value per touched row.

    Args:
        *args: of `keras.optimizers.Adagrad`, by position.
        stochastic_rounding: whether weights of bfloat16 tables are rounded at
            random, such that the expectation is exact, or to nearest.
        **kwargs: of `keras.optimizers.Adagrad`, by name.
    """

    def build(self, variables: Sequence[Any]) -> None:
        if getattr(self, "_built", False):
            return
        self._prepare(variables)
        # Past Adagrad's own build, which would add full accumulators.
        super(tf.keras.optimizers.Adagrad, self).build(variables)
        self._accumulators = [
            self._add_slot(
                variable,
                "accumulator",
                self.initial_accumulator_value,
                per_row=len(variable.shape) == 2,
            )
            for variable in variables
        ]
        self._built = True

    def _update_one(
        self, gradient: Any, variable: Any, *learning_rate: Any
    ) -> None:
        sparse = isinstance(gradient, tf.IndexedSlices)
        fused = is_bfloat16_table(variable) or (sparse and has_kernel(variable))
        if fused or len(variable.shape) != 2:
            super()._update_one(gradient, variable, *learning_rate)
            return
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        rate = learning_rate[0] if learning_rate else self.learning_rate
        variable = self._native(variable)
        slot = self._native(self._slot(self._accumulators, variable))
        slot.assign_add(_mean_squares(variable, gradient))
        scale = tf.cast(rate, variable.dtype) / tf.sqrt(slot + self.epsilon)
        variable.assign_sub(scale[:, tf.newaxis] * gradient)

    def _update_rows(
        self,
        variable: tf.Variable,
        rows: tf.Tensor,
        grads: tf.Tensor,
        learning_rate: Any,
    ) -> None:
        means = None
        if _has_part_of_rows(variable):
            rows, grads = optimizer_ops.sum_duplicate_rows(rows, grads)
            means = _mean_squares(variable, grads)
        optimizer_ops.apply_row_wise_adagrad(
            variable,
            self._slot(self._accumulators, variable),
            rows,
            grads,
            learning_rate=learning_rate,
            epsilon=self.epsilon,
            mean_squares=means,
            rounding_seed=self.rounding_seed(variable),
        )


def _has_part_of_rows(variable: tf.Variable) -> bool:
    spec = shard_spec(variable)
    return spec is not None and spec.column_parts > 1


def _mean_squares(variable: tf.Variable, grads: tf.Tensor) -> tf.Tensor:
    """Means over whole rows of squared gradients, `[n]` of `[n, dim]`."""
    spec = shard_spec(variable)
    if spec is None or spec.column_parts == 1:
        return tf.reduce_mean(tf.square(grads), axis=1)
    # Ranks that hold other columns of these rows look up the same ids.
    squares = tf.reduce_sum(tf.square(grads), axis=1)
    label = f"{spec.table}/row-wise accumulator"
    return sum_over_ranks(squares, label, spec.row_peers) / spec.dim
