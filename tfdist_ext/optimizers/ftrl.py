# SPDX-License-Identifier: Apache-2.0
"""FTRL with fused row updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.ops import optimizer_ops
from tfdist_ext.optimizers.row_optimizer import RowOptimizer


@tf.keras.utils.register_keras_serializable(package="tfdist_ext")
class Ftrl(RowOptimizer, tf.keras.optimizers.Ftrl):
    """Keras's Ftrl; lazy, fused and in place for sparse gradients.

    Takes the arguments of `keras.optimizers.Ftrl`, with the same defaults. A
    learning_rate_power of -0.5, the default, is faster than others.

    Dense gradients get Keras's Ftrl. In a table, a step updates the rows it
    looked up and nothing else. The result is Keras's where a row without a
    gradient does not change in Keras either: with a table that starts at
    zero, a constant learning rate, and no l2_shrinkage. Otherwise Keras
    recomputes every weight in every step: its first step sets every row
    without a gradient to zero whatever the initial weights, and a changed
    learning rate moves all rows at once.

    Args:
        *args: of `keras.optimizers.Ftrl`, by position.
        stochastic_rounding: whether weights of bfloat16 tables are rounded at
            random, such that the expectation is exact, or to nearest.
        **kwargs: of `keras.optimizers.Ftrl`, by name.
    """

    def build(self, variables: Sequence[Any]) -> None:
        if getattr(self, "_built", False):
            return
        # Past Ftrl's own build for the reasons of Adagrad's.
        self._prepare(variables)
        super(tf.keras.optimizers.Ftrl, self).build(variables)
        self._accumulators, self._linears = [], []
        for variable in variables:
            self._accumulators.append(
                self._add_slot(
                    variable,
                    "accumulator",
                    self.initial_accumulator_value,
                    False,
                )
            )
            self._linears.append(self._add_slot(variable, "linear", 0.0, False))
        self._built = True

    def _update_rows(
        self,
        variable: tf.Variable,
        rows: tf.Tensor,
        grads: tf.Tensor,
        learning_rate: Any,
    ) -> None:
        optimizer_ops.apply_row_ftrl(
            variable,
            self._slot(self._accumulators, variable),
            self._slot(self._linears, variable),
            rows,
            grads,
            learning_rate=learning_rate,
            learning_rate_power=self.learning_rate_power,
            l1=self.l1_regularization_strength,
            l2=self.l2_regularization_strength,
            l2_shrinkage=self.l2_shrinkage_regularization_strength,
            beta=self.beta,
            rounding_seed=self.rounding_seed(variable),
        )
