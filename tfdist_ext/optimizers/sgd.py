# SPDX-License-Identifier: Apache-2.0
"""SGD with fused row updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.ops import optimizer_ops
from tfdist_ext.optimizers.row_optimizer import RowOptimizer


@tf.keras.utils.register_keras_serializable(package="tfdist_ext")
class SGD(RowOptimizer, tf.keras.optimizers.SGD):
    """Keras's SGD, fused and in place for sparse gradients.

    Takes the arguments of `keras.optimizers.SGD`, with the same defaults.

    Without momentum the result is Keras's. With momentum, updates of tables
    are lazy: a row moves, and its momentum decays, in the steps that look it
    up. Keras's own SGD lets every row of the table glide on in every step; it
    trains partitioned tables too, at the cost of a pass over the shard.

    Args:
        *args: of `keras.optimizers.SGD`, by position.
        stochastic_rounding: whether weights of bfloat16 tables are rounded at
            random, such that the expectation is exact, or to nearest.
        **kwargs: of `keras.optimizers.SGD`, by name.
    """

    def build(self, variables: Sequence[Any]) -> None:
        if KERAS_3 or self.momentum:
            super().build(variables)
        elif not getattr(self, "_built", False):
            # tf_keras would add momentums that it multiplies by zero.
            self._prepare(variables)
            super(tf.keras.optimizers.SGD, self).build(variables)
            self.momentums = [None] * len(variables)
            self._built = True

    def _update_rows(
        self,
        variable: tf.Variable,
        rows: tf.Tensor,
        grads: tf.Tensor,
        learning_rate: Any,
    ) -> None:
        if not self.momentum:
            optimizer_ops.apply_row_sgd(
                variable,
                rows,
                grads,
                learning_rate=learning_rate,
                rounding_seed=self.rounding_seed(variable),
            )
            return
        optimizer_ops.apply_row_momentum(
            variable,
            self._slot(self.momentums, variable),
            rows,
            grads,
            learning_rate=learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
            rounding_seed=self.rounding_seed(variable),
        )
