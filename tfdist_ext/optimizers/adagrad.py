# SPDX-License-Identifier: Apache-2.0
"""Adagrad with fused row updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.ops import optimizer_ops
from tfdist_ext.optimizers.row_optimizer import RowOptimizer


@tf.keras.utils.register_keras_serializable(package="tfdist_ext")
class Adagrad(RowOptimizer, tf.keras.optimizers.Adagrad):
    """Keras's Adagrad, fused and in place for sparse gradients.

    Takes the arguments of `keras.optimizers.Adagrad`, with the same defaults,
    and gives the same result: a row without a gradient does not change in
    either.

    Args:
        *args: of `keras.optimizers.Adagrad`, by position.
        stochastic_rounding: whether weights of bfloat16 tables are rounded at
            random, such that the expectation is exact, or to nearest.
        **kwargs: of `keras.optimizers.Adagrad`, by name.
    """

    def build(self, variables: Sequence[Any]) -> None:
        if getattr(self, "_built", False):
            return
        # Older Keras 3 does not say which variable a slot belongs to, and
        # the slot of a shard must be a shard; tf_keras rounds the initial
        # value to the dtype of the variable.
        self._prepare(variables)
        super(tf.keras.optimizers.Adagrad, self).build(variables)
        self._accumulators = [
            self._add_slot(
                variable, "accumulator", self.initial_accumulator_value, False
            )
            for variable in variables
        ]
        self._built = True

    def _update_rows(
        self,
        variable: tf.Variable,
        rows: tf.Tensor,
        grads: tf.Tensor,
        learning_rate: Any,
    ) -> None:
        optimizer_ops.apply_row_adagrad(
            variable,
            self._slot(self._accumulators, variable),
            rows,
            grads,
            learning_rate=learning_rate,
            epsilon=self.epsilon,
            rounding_seed=self.rounding_seed(variable),
        )
