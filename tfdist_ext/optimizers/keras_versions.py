# SPDX-License-Identifier: Apache-2.0
"""Differences between the optimizers of Keras 3 and of tf_keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.ops.library import has_gpu_kernels
from tfdist_ext.ops.lookup_ops import mark_unique_rows
from tfdist_ext.optimizers.row_gradients import GradsAndVars
from tfdist_ext.optimizers.row_gradients import clip_gradients
from tfdist_ext.type_names import DTypeLike
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import InitializerLike
from tfdist_ext.type_names import Scalar
from tfdist_ext.type_names import Shape
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable


def has_kernel(variable: Variable) -> bool:
    """Whether the fused ops can update a variable.

    Args:
        variable: a TensorFlow or Keras variable.

    Returns:
        True for float32 or bfloat16 `[n, dim]` on a CPU, or on a GPU if the
        library has GPU kernels.
    """
    on_gpu = "GPU" in (getattr(variable, "device", "") or "")
    return (
        len(variable.shape) == 2
        and tf.as_dtype(variable.dtype) in (tf.float32, tf.bfloat16)
        and (has_gpu_kernels() or not on_gpu)
    )


def is_bfloat16_table(variable: Variable) -> bool:
    """Whether a variable is a bfloat16 table, whose slots are float32.

    In bfloat16, a slot would lose the small amounts that each step adds to it.

    Args:
        variable: a TensorFlow or Keras variable.

    Returns:
        True for bfloat16 `[n, dim]` for which `has_kernel` is true.
    """
    return has_kernel(variable) and tf.as_dtype(variable.dtype) == tf.bfloat16


# Stands for the Keras optimizer, the next base class of every optimizer.
_Optimizer: Any = object


class _Keras3Differences(_Optimizer):
    """Methods that override those of `keras.optimizers.Optimizer`."""

    def _index_of(self, variable: Variable) -> int:
        return self._get_variable_index(variable)

    def _native(self, variable: Variable) -> tf.Variable:
        if isinstance(variable, tf.keras.Variable):
            return variable.value
        return variable

    def add_variable_from_reference(
        self,
        reference_variable: Variable,
        name: str | None = None,
        initializer: InitializerLike = "zeros",
    ) -> Variable | None:
        """Adds a slot, which is initialized without a temporary copy.

        Tables with an optimizer of their own have no slot here.

        Args:
            reference_variable: the variable that the slot belongs to.
            name: the name of the slot.
            initializer: a Keras initializer or its name.
        """
        if self._has_own_optimizer(reference_variable):
            return None
        value = getattr(initializer, "value", None)
        if isinstance(value, float | int):
            # Keras would make ones first, and then multiply them by the value.
            def initializer(shape: Shape, dtype: DTypeLike = None) -> tf.Tensor:
                return tf.fill(shape, tf.cast(value, dtype))

        if is_bfloat16_table(reference_variable):
            slot = self._add_slot_of_shape(
                reference_variable,
                name or "var",
                initializer,
                reference_variable.shape,
            )
        else:
            slot = super().add_variable_from_reference(
                reference_variable, name=name, initializer=initializer
            )
        return self._note_slot(reference_variable, slot, value or 0.0)

    def _add_slot(
        self, variable: Variable, name: str, value: float, per_row: bool
    ) -> Variable | None:
        """Adds a slot of a variable's shape, or with one value per row."""
        if self._has_own_optimizer(variable):
            return None
        initializer = tf.keras.initializers.Constant(value)
        if not per_row:
            return self.add_variable_from_reference(
                variable, name=name, initializer=initializer
            )
        slot = self._add_slot_of_shape(
            variable, name, initializer, (variable.shape[0],)
        )
        return self._note_slot(variable, slot, value)

    def _add_slot_of_shape(
        self,
        variable: Variable,
        name: str,
        initializer: InitializerLike,
        shape: Shape,
    ) -> Variable:
        native = self._native(variable)
        path = getattr(variable, "path", native.name)
        strategy = self._distribution_strategy
        with strategy.extended.colocate_vars_with(native):
            return self.add_variable(
                shape=shape,
                initializer=initializer,
                dtype=_slot_dtype(variable),
                name=path.replace("/", "_").replace(":", "_") + f"_{name}",
            )

    def apply(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> None:
        if self.loss_scale_factor is not None:
            grads = unscalable(grads)
        super().apply(grads, trainable_variables)
        for own in self.table_optimizers:
            own.iterations.assign_add(1)

    def _overwrite_model_variables_with_average_value(
        self, trainable_variables: Sequence[Variable]
    ) -> None:
        """Overwrites variables except tables with an optimizer of their own."""
        for variable, average in zip(
            trainable_variables,
            self._model_variables_moving_average,
            strict=True,
        ):
            if average is not None:
                self._distribution_strategy.extended.update(
                    self._native(variable),
                    lambda weight, mean: weight.assign(mean),
                    args=(average,),
                )

    def rate_argument(self) -> tuple[Scalar, ...]:
        """Returns the learning rate as an argument of `update_step`."""
        return (self._get_current_learning_rate(),)

    def _distributed_tf_update_step(self, *args: Any) -> None:
        with self._collecting_updates():
            super()._distributed_tf_update_step(*args)

    def _clip_gradients(self, grads: Sequence[Gradient]) -> Sequence[Gradient]:
        # Keras would clip here, which is before the sum over the ranks.
        return grads

    def _all_reduce_sum_gradients(
        self, grads_and_vars: GradsAndVars
    ) -> GradsAndVars:
        grads_and_vars = list(grads_and_vars)
        for grad, _ in grads_and_vars:
            if isinstance(grad, tf.IndexedSlices):
                mark_unique_rows(grad)
        return clip_gradients(
            super()._all_reduce_sum_gradients(grads_and_vars),
            clipnorm=self.clipnorm,
            global_clipnorm=self.global_clipnorm,
            clipvalue=self.clipvalue,
        )


def _slot_dtype(variable: Variable) -> str | tf.DType:
    return "float32" if is_bfloat16_table(variable) else variable.dtype


def unscalable(grads: Sequence[Gradient]) -> list[Any]:
    """Returns gradients that Keras can divide by the loss scale.

    Args:
        grads: tensors, IndexedSlices or None.
    """
    return [
        _Unscalable.of(grad) if isinstance(grad, tf.IndexedSlices) else grad
        for grad in grads
    ]


class _Unscalable(tf.IndexedSlices):
    """IndexedSlices that support Keras's division by the loss scale."""

    @classmethod
    def of(cls, slices: tf.IndexedSlices) -> _Unscalable:
        return cls(slices.values, slices.indices, slices.dense_shape)

    def __truediv__(self, scale: Scalar) -> tf.IndexedSlices:
        return tf.IndexedSlices(
            self.values / scale, self.indices, self.dense_shape
        )


class _LegacyDifferences(_Optimizer):
    """Methods that override those of `tf_keras.optimizers.Optimizer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # XLA has no kernels for row updates.
        self.jit_compile = False

    def _index_of(self, variable: Variable) -> int:
        return self._index_dict[self._var_key(variable)]

    def _native(self, variable: Variable) -> tf.Variable:
        return variable

    def _add_slot(
        self, variable: Variable, name: str, value: float, per_row: bool
    ) -> Variable | None:
        """Adds a slot of a variable's shape, or with one value per row."""
        if self._has_own_optimizer(variable):
            return None
        shape = variable.shape[:1] if per_row else variable.shape
        initializer = tf.keras.initializers.Constant(value)
        slot = self.add_variable_from_reference(
            variable,
            name,
            initial_value=initializer(shape, _slot_dtype(variable)),
        )
        return self._note_slot(variable, slot, value)

    def add_variable_from_reference(
        self,
        model_variable: tf.Variable,
        variable_name: str,
        shape: Shape = None,
        initial_value: TensorLike = None,
    ) -> Variable | None:
        """Adds a slot, in float32 if the table is bfloat16.

        Tables with an optimizer of their own have no slot here.

        Args:
            model_variable: the variable that the slot belongs to.
            variable_name: the name of the slot.
            shape: the shape of the slot; None for the variable's shape.
            initial_value: the initial value; None for zeros.
        """
        if self._has_own_optimizer(model_variable):
            return None
        if initial_value is None and marks.keys_of(model_variable):
            slot = self.add_variable_from_reference(
                model_variable,
                variable_name,
                initial_value=tf.zeros(
                    shape or model_variable.shape, _slot_dtype(model_variable)
                ),
            )
            return self._note_slot(model_variable, slot, 0.0)
        if not is_bfloat16_table(model_variable):
            return super().add_variable_from_reference(
                model_variable, variable_name, shape, initial_value
            )
        if initial_value is None:
            initial_value = tf.zeros(shape or model_variable.shape, tf.float32)
        strategy = tf.distribute.get_strategy()
        with strategy.extended.colocate_vars_with(model_variable):
            variable = tf.Variable(
                tf.cast(initial_value, tf.float32),
                name=f"{variable_name}/{model_variable._shared_name}",
                trainable=False,
            )
        self._variables.append(variable)
        return variable

    def apply_gradients(self, *args: Any, **kwargs: Any) -> object:
        for own in self.table_optimizers:
            own._compute_current_learning_rate()
        result = super().apply_gradients(*args, **kwargs)
        for own in self.table_optimizers:
            own.iterations.assign_add(1)
        return result

    def _distributed_apply_gradients_fn(
        self, *args: Any, **kwargs: Any
    ) -> object:
        if self.use_ema:  # It reads the variables at once.
            return super()._distributed_apply_gradients_fn(*args, **kwargs)
        with self._collecting_updates():
            return super()._distributed_apply_gradients_fn(*args, **kwargs)

    def rate_argument(self) -> tuple[Scalar, ...]:
        """Returns no argument: `update_step` reads the learning rate itself."""
        return ()

    def _clip_gradients(self, grads: Sequence[Gradient]) -> Sequence[Gradient]:
        # `_internal_apply_gradients` clips, because it knows the variables.
        return grads

    def _deduplicate_sparse_grad(
        self, grads: Sequence[Gradient]
    ) -> Sequence[Gradient]:
        # The row update sums duplicate rows.
        return grads

    def _internal_apply_gradients(self, grads_and_vars: GradsAndVars) -> object:
        clipped = clip_gradients(
            grads_and_vars,
            clipnorm=self.clipnorm,
            global_clipnorm=self.global_clipnorm,
            clipvalue=self.clipvalue,
        )
        return super()._internal_apply_gradients(clipped)


KerasDifferences: Any = _Keras3Differences if KERAS_3 else _LegacyDifferences
