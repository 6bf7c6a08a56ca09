# SPDX-License-Identifier: Apache-2.0
"""Adam, lazy or exact, with fused row updates."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.ops import optimizer_ops
from tfdist_ext.optimizers.row_optimizer import RowOptimizer


@tf.keras.utils.register_keras_serializable(package="tfdist_ext")
class Adam(RowOptimizer, tf.keras.optimizers.Adam):
    """Keras's Adam; fused and in place for sparse gradients.

    Takes the arguments of `keras.optimizers.Adam`, with the same defaults,
    and `lazy`. Dense gradients get Keras's Adam. In a table, with

    - `lazy=True`, a step updates the moments and the weights of the rows it
      looked up and nothing else; the bias correction counts all steps.
    - `lazy=False`, the result is that of Keras's own Adam, which decays the
      moments of every row and moves every row in every step. That takes one
      pass over the shard and its slots in every step, without a copy; Keras's
      own takes several, with copies.

    The two are equal if every step looks up every row.

    Args:
        *args: of `keras.optimizers.Adam`, by position.
        lazy: whether a step leaves the rows alone that it has not looked up.
        **kwargs: of `keras.optimizers.Adam`, by name, and
            `stochastic_rounding`, see `SGD`.
    """

    def __init__(self, *args: Any, lazy: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "lazy": self.lazy}

    def _update_rows(
        self,
        variable: tf.Variable,
        rows: tf.Tensor,
        grads: tf.Tensor,
        learning_rate: Any,
    ) -> None:
        step = tf.cast(self.iterations, tf.int64) + 1
        hats = []
        if self.amsgrad:
            hats = [self._slot(self._velocity_hats, variable)]
        optimizer_ops.apply_row_adam(
            variable,
            self._slot(self._momentums, variable),
            self._slot(self._velocities, variable),
            rows,
            grads,
            learning_rate=learning_rate,
            beta_1=self.beta_1,
            beta_2=self.beta_2,
            epsilon=self._epsilon_hat(step),
            step=step,
            velocity_hats=hats,
            all_rows=not self.lazy,
            rounding_seed=self.rounding_seed(variable),
        )

    def _rows_changed(self, gradient: Any, variable: Any) -> tf.Tensor:
        if not self.lazy:
            return tf.range(variable.shape[0], dtype=tf.int64)
        return super()._rows_changed(gradient, variable)

    def _epsilon_hat(self, step: tf.Tensor) -> Any:
        if not getattr(self, "adaptive_epsilon", False):
            return self.epsilon
        beta_2 = tf.constant(self.beta_2, tf.float64)
        power = beta_2 ** tf.cast(step, tf.float64)
        return self.epsilon * tf.sqrt(1 - power)
