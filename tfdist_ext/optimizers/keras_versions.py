# SPDX-License-Identifier: Apache-2.0
"""Where the optimizers of Keras 3 and of tf_keras differ.

`KerasDifferences` is a mix-in in front of an optimizer of the Keras in use,
which is the one that `tf.keras` is when this module is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.optimizers.clipping import clip_gradients

# tf.keras of tf_keras has no __version__; `ops` came with Keras 3.
KERAS_3 = hasattr(tf.keras, "ops")

# Stands for the Keras optimizer that follows in the order of the bases.
_Optimizer: Any = object


class _Keras3Differences(_Optimizer):
    """Hooks of `keras.optimizers.Optimizer`."""

    def _index_of(self, variable: Any) -> int:
        return self._get_variable_index(variable)

    def _native(self, variable: Any) -> tf.Variable:
        if isinstance(variable, tf.keras.Variable):
            return variable.value
        return variable

    def add_variable_from_reference(
        self,
        reference_variable: Any,
        name: Any = None,
        initializer: Any = "zeros",
    ) -> Any:
        """Adds a slot, made in place: it may be as large as the table."""
        value = getattr(initializer, "value", None)
        if isinstance(value, float | int):
            # Keras's own makes ones first, then their product with the value.
            def initializer(shape: Any, dtype: Any = None) -> tf.Tensor:
                return tf.fill(shape, tf.cast(value, dtype))

        return super().add_variable_from_reference(
            reference_variable, name=name, initializer=initializer
        )

    def _add_slot(
        self, variable: Any, name: str, value: float, per_row: bool
    ) -> Any:
        """Adds a slot like a variable, or with one value per row of it."""
        initializer = tf.keras.initializers.Constant(value)
        if not per_row:
            return self.add_variable_from_reference(
                variable, name=name, initializer=initializer
            )
        native = self._native(variable)
        path = getattr(variable, "path", native.name)
        strategy = self._distribution_strategy
        with strategy.extended.colocate_vars_with(native):
            return self.add_variable(
                shape=(variable.shape[0],),
                initializer=initializer,
                dtype=variable.dtype,
                name=path.replace("/", "_").replace(":", "_") + f"_{name}",
            )

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        if self.loss_scale_factor is not None:
            grads = [
                _Unscalable.of(grad)
                if isinstance(grad, tf.IndexedSlices)
                else grad
                for grad in grads
            ]
        return super().apply(grads, trainable_variables)

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        # Keras would clip here, before the sum over the ranks.
        return grads

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return clip_gradients(
            super()._all_reduce_sum_gradients(grads_and_vars),
            clipnorm=self.clipnorm,
            global_clipnorm=self.global_clipnorm,
            clipvalue=self.clipvalue,
        )


class _Unscalable(tf.IndexedSlices):
    """IndexedSlices that Keras can divide by the loss scale."""

    @classmethod
    def of(cls, slices: tf.IndexedSlices) -> _Unscalable:
        return cls(slices.values, slices.indices, slices.dense_shape)

    def __truediv__(self, scale: Any) -> tf.IndexedSlices:
        return tf.IndexedSlices(
            self.values / scale, self.indices, self.dense_shape
        )


class _LegacyDifferences(_Optimizer):
    """Hooks of `tf_keras.optimizers.Optimizer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # XLA has no kernel for a row update.
        self.jit_compile = False

    def _index_of(self, variable: Any) -> int:
        return self._index_dict[self._var_key(variable)]

    def _native(self, variable: Any) -> tf.Variable:
        return variable

    def _add_slot(
        self, variable: Any, name: str, value: float, per_row: bool
    ) -> Any:
        """Adds a slot like a variable, or with one value per row of it."""
        shape = variable.shape[:1] if per_row else variable.shape
        initializer = tf.keras.initializers.Constant(value)
        return self.add_variable_from_reference(
            variable, name, initial_value=initializer(shape, variable.dtype)
        )

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        # Clipped below, where each gradient comes with its variable.
        return grads

    def _deduplicate_sparse_grad(self, grads: Sequence[Any]) -> Sequence[Any]:
        # The update does that.
        return grads

    def _internal_apply_gradients(self, grads_and_vars: Any) -> Any:
        clipped = clip_gradients(
            grads_and_vars,
            clipnorm=self.clipnorm,
            global_clipnorm=self.global_clipnorm,
            clipvalue=self.clipvalue,
        )
        return super()._internal_apply_gradients(clipped)


KerasDifferences: Any = _Keras3Differences if KERAS_3 else _LegacyDifferences
