# SPDX-License-Identifier: Apache-2.0
"""Adagrad with fused row updates."""

from __future__ import annotations

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
    """

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
        )
