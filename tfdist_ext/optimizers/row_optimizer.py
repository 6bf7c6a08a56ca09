# SPDX-License-Identifier: Apache-2.0
"""What the optimizers have in common: sparse gradients go to a fused op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.ops import optimizer_ops
from tfdist_ext.optimizers.checks import check_supported
from tfdist_ext.optimizers.duplicates import without_duplicates
from tfdist_ext.optimizers.keras_versions import KerasDifferences
from tfdist_ext.sharding.config import shard_spec


class RowOptimizer(KerasDifferences):
    """Mix-in in front of a Keras optimizer.

    A gradient in IndexedSlices updates its rows and their slots in place, in
    one op, whether the variable is a shard or an ordinary table. Rows that
    occur several times are updated once with the sum of their gradients.
    Every other gradient takes Keras's own way.

    Clipping happens after the sum over the ranks, with norms of whole
    variables: the result is that of one process with the global batch.

    A subclass defines `_update_rows`.
    """

    # Tells the strategy that options work over all ranks.
    _tfdist_row_updates = True

    def build(self, variables: Sequence[Any]) -> None:
        self._check_shards(variables)
        super().build(variables)

    def _check_shards(self, variables: Sequence[Any]) -> None:
        if any(shard_spec(variable) is not None for variable in variables):
            check_supported(self)

    def update_step(
        self, gradient: Any, variable: Any, *learning_rate: Any
    ) -> None:
        """Updates one variable (Keras 3 passes the learning rate).

        Args:
            gradient: tensor or IndexedSlices.
            variable: the variable, in a strategy this replica's component.
            *learning_rate: the learning rate under Keras 3, nothing under
                tf_keras.
        """
        if not isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, *learning_rate)
            return
        if not has_kernel(variable):
            gradient = without_duplicates(gradient)
            super().update_step(gradient, variable, *learning_rate)
            return
        self._update_rows(
            self._native(variable),
            tf.cast(gradient.indices, tf.int64),
            tf.cast(gradient.values, tf.float32),
            learning_rate[0] if learning_rate else self.learning_rate,
        )

    def _update_rows(
        self,
        variable: tf.Variable,
        rows: tf.Tensor,
        grads: tf.Tensor,
        learning_rate: Any,
    ) -> None:
        """Updates rows int64 `[n]` of a variable with grads `[n, dim]`."""
        raise NotImplementedError

    def _slot(self, slots: Sequence[Any], variable: Any) -> Any:
        return slots[self._index_of(variable)]

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Decays whole variables, tables in place instead of by a copy."""
        if not self.weight_decay:
            return
        tf.__internal__.distribute.interim.maybe_merge_call(
            self._decay_all, self._distribution_strategy, variables
        )

    def _decay_all(self, strategy: Any, variables: Sequence[Any]) -> None:
        def decay(variable: tf.Variable) -> None:
            if not self._use_weight_decay(variable):
                return
            rate = tf.cast(self.learning_rate, variable.dtype)
            if has_kernel(variable):
                optimizer_ops.scale_table(
                    variable, 1 - self.weight_decay * tf.cast(rate, tf.float64)
                )
            else:
                decay = tf.cast(self.weight_decay, variable.dtype)
                variable.assign_sub(variable * decay * rate)

        for variable in variables:
            strategy.extended.update(self._native(variable), decay, group=False)


def has_kernel(variable: Any) -> bool:
    """Whether the ops can update a variable: float32 `[n, dim]` on a CPU."""
    return (
        len(variable.shape) == 2
        and tf.as_dtype(variable.dtype) == tf.float32
        and "GPU" not in (getattr(variable, "device", "") or "")
    )
