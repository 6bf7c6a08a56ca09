# SPDX-License-Identifier: Apache-2.0
"""Optimizers with fused row updates, and learning rates of larger batches."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm.exchanges import sum_over_ranks
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.marks import shard_spec
from tfdist_ext.ops import optimizer_ops
from tfdist_ext.ops.optimizer_ops import RowRule
from tfdist_ext.optimizers.keras_versions import has_kernel
from tfdist_ext.optimizers.keras_versions import is_bfloat16_table
from tfdist_ext.optimizers.row_optimizer import RowOptimizer
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Rate
from tfdist_ext.type_names import Scalar
from tfdist_ext.type_names import Variable

keras = tf.keras


@tf.keras.utils.register_keras_serializable(package="tfdist_ext")
class SGD(RowOptimizer, tf.keras.optimizers.SGD):
    """Keras's SGD, with fused in-place updates for sparse gradients.

    Takes the arguments of `keras.optimizers.SGD`, with the same defaults.

    Without momentum the result is that of Keras. With momentum, updates of
    tables are lazy: a row moves, and its momentum decays, only in steps that
    look it up. Keras's own SGD moves every row of the table in every step. It
    can train partitioned tables too, but each step passes over the shard.

    Args:
        *args: positional arguments of `keras.optimizers.SGD`.
        stochastic_rounding: whether weights of bfloat16 tables are rounded at
            random, such that the expectation is exact, or to nearest.
        row_clip: a `CowClip`, which clips the gradient of each row of a table;
            None clips none.
        **kwargs: keyword arguments of `keras.optimizers.SGD`.
    """

    def build(self, variables: Sequence[Variable]) -> None:
        if KERAS_3 or self.momentum:
            super().build(variables)
        elif not getattr(self, "_built", False):
            # Without this, tf_keras adds momentums and multiplies them by zero.
            self._prepare(variables)
            super(tf.keras.optimizers.SGD, self).build(variables)
            self.momentums = [None] * len(variables)
            self._built = True

    def _rule(self, learning_rate: Rate) -> RowRule:
        if not self.momentum:
            return optimizer_ops.sgd(learning_rate=learning_rate)
        return optimizer_ops.momentum(
            learning_rate=learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
        )

    def _slots(self) -> list[Sequence[Any]]:
        return [self.momentums] if self.momentum else []


@tf.keras.utils.register_keras_serializable(package="tfdist_ext")
class Adagrad(RowOptimizer, tf.keras.optimizers.Adagrad):
    """Keras's Adagrad, with fused in-place updates for sparse gradients.

    Takes the arguments of `keras.optimizers.Adagrad`, with the same defaults.
    The result is that of Keras, where a row without a gradient does not change
    either.

    Args:
        *args: positional arguments of `keras.optimizers.Adagrad`.
        stochastic_rounding: whether weights of bfloat16 tables are rounded at
            random, such that the expectation is exact, or to nearest.
        row_clip: a `CowClip`, which clips the gradient of each row of a table;
            None clips none.
        **kwargs: keyword arguments of `keras.optimizers.Adagrad`.
    """

    def build(self, variables: Sequence[Variable]) -> None:
        if getattr(self, "_built", False):
            return
        # This skips Keras's `build`. The slot of a shard must be a shard, but
        # older versions of Keras 3 do not pass the slot's variable. tf_keras
        # rounds the initial value to the dtype of the variable.
        self._prepare(variables)
        super(tf.keras.optimizers.Adagrad, self).build(variables)
        self._accumulators = [
            self._add_slot(
                variable, "accumulator", self.initial_accumulator_value, False
            )
            for variable in variables
        ]
        self._built = True

    def _rule(self, learning_rate: Rate) -> RowRule:
        return optimizer_ops.adagrad(
            learning_rate=learning_rate, epsilon=self.epsilon
        )

    def _slots(self) -> list[Sequence[Any]]:
        return [self._accumulators]


@tf.keras.utils.register_keras_serializable(package="tfdist_ext")
class Adam(RowOptimizer, tf.keras.optimizers.Adam):
    """Keras's Adam, with fused in-place updates for sparse gradients.

    Takes the arguments of `keras.optimizers.Adam`, with the same defaults,
    and `lazy`. Dense gradients are applied by Keras's Adam. For a table:

    - `lazy=True` updates only the moments and the weights of the rows that the
      step has looked up; the bias correction counts all steps.
    - `lazy=False` gives the result of Keras's own Adam, which decays the
      moments of every row, and moves every row, in every step. Each step makes
      one pass over the shard and its slots, without copies. Keras's own Adam
      makes several passes, with copies.

    Both give the same result if every step looks up every row.

    Args:
        *args: positional arguments of `keras.optimizers.Adam`.
        lazy: whether a step leaves rows unchanged that it has not looked up.
        **kwargs: keyword arguments of `keras.optimizers.Adam`, and
            `stochastic_rounding`, see `SGD`.
    """

    def __init__(self, *args: Any, lazy: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def get_config(self) -> Config:
        return {**super().get_config(), "lazy": self.lazy}

    def _rule(self, learning_rate: Rate) -> RowRule:
        step = tf.cast(self.iterations, tf.int64) + 1
        return optimizer_ops.adam(
            learning_rate=learning_rate,
            beta_1=self.beta_1,
            beta_2=self.beta_2,
            epsilon=self._epsilon_hat(step),
            step=step,
            all_rows=not self.lazy,
        )

    def _slots(self) -> list[Sequence[Any]]:
        hats = [self._velocity_hats] if self.amsgrad else []
        return [self._momentums, self._velocities, *hats]

    def _rows_changed(
        self, gradient: Gradient, variable: Variable
    ) -> tf.Tensor:
        if not self.lazy:
            return tf.range(variable.shape[0], dtype=tf.int64)
        return super()._rows_changed(gradient, variable)

    def _epsilon_hat(self, step: tf.Tensor) -> Scalar:
        if not getattr(self, "adaptive_epsilon", False):
            return self.epsilon
        beta_2 = tf.constant(self.beta_2, tf.float64)
        power = beta_2 ** tf.cast(step, tf.float64)
        return self.epsilon * tf.sqrt(1 - power)


@tf.keras.utils.register_keras_serializable(package="tfdist_ext")
class Ftrl(RowOptimizer, tf.keras.optimizers.Ftrl):
    """Keras's Ftrl, with lazy, fused in-place updates for sparse gradients.

    Takes the arguments of `keras.optimizers.Ftrl`, with the same defaults. A
    learning_rate_power of -0.5, the default, is faster than other values.

    Dense gradients are applied by Keras's Ftrl. In a table, a step updates only
    the rows that it has looked up. The result is that of Keras if a row without
    a gradient does not change in Keras either. This requires a table that
    starts at zero, a constant learning rate, and no l2_shrinkage. Otherwise
    Keras recomputes every weight in every step. Its first step sets every row
    without a gradient to zero, whatever the initial weights, and a changed
    learning rate moves all rows at once.

    Args:
        *args: positional arguments of `keras.optimizers.Ftrl`.
        stochastic_rounding: whether weights of bfloat16 tables are rounded at
            random, such that the expectation is exact, or to nearest.
        row_clip: a `CowClip`, which clips the gradient of each row of a table;
            None clips none.
        **kwargs: keyword arguments of `keras.optimizers.Ftrl`.
    """

    def build(self, variables: Sequence[Variable]) -> None:
        if getattr(self, "_built", False):
            return
        # This skips Keras's `build`, for the reasons given in `Adagrad.build`.
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

    def _rule(self, learning_rate: Rate) -> RowRule:
        return optimizer_ops.ftrl(
            learning_rate=learning_rate,
            learning_rate_power=self.learning_rate_power,
            l1=self.l1_regularization_strength,
            l2=self.l2_regularization_strength,
            l2_shrinkage=self.l2_shrinkage_regularization_strength,
            beta=self.beta,
        )

    def _slots(self) -> list[Sequence[Any]]:
        return [self._accumulators, self._linears]


@tf.keras.utils.register_keras_serializable(package="tfdist_ext")
class RowWiseAdagrad(RowOptimizer, tf.keras.optimizers.Adagrad):
    """Adagrad with one accumulator per row of a matrix.

    A table `[rows, dim]` needs a slot of `rows` values instead of
    `rows * dim`. In each step, for every row r with gradient g:

        a[r] += mean(g ** 2)
        w[r] -= learning_rate * g / sqrt(a[r] + epsilon)

    The accumulator is that of FBGEMM, and epsilon is in the same place as in
    Keras. Matrices with dense gradients follow the same rule, where a row is an
    index of axis 0. Variables with another number of dimensions, such as
    biases, follow ordinary Adagrad. Takes the arguments of
    `keras.optimizers.Adagrad`, with the same defaults.

    If several ranks hold columns of a row, the mean is over all columns. This
    takes one exchange of one value per touched row.

    Args:
        *args: positional arguments of `keras.optimizers.Adagrad`.
        stochastic_rounding: whether weights of bfloat16 tables are rounded at
            random, such that the expectation is exact, or to nearest.
        row_clip: a `CowClip`, which clips the gradient of each row of a table;
            None clips none.
        **kwargs: keyword arguments of `keras.optimizers.Adagrad`.
    """

    def build(self, variables: Sequence[Variable]) -> None:
        if getattr(self, "_built", False):
            return
        self._prepare(variables)
        # This skips Keras's `build`, which would add accumulators of full size.
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
        self, gradient: Gradient, variable: tf.Variable, *learning_rate: Scalar
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
        learning_rate: Rate,
    ) -> None:
        if not _has_part_of_rows(variable):
            super()._update_rows(variable, rows, grads, learning_rate)
            return
        rows, grads = optimizer_ops.sum_duplicate_rows(rows, grads)
        optimizer_ops.update_rows(
            self._rule(learning_rate),
            variable,
            self._slots_of(variable),
            rows,
            grads,
            mean_squares=_mean_squares(variable, grads),
            rounding_seed=self.rounding_seed(variable),
        )

    def _rule(self, learning_rate: Rate) -> RowRule:
        return optimizer_ops.row_wise_adagrad(
            learning_rate=learning_rate, epsilon=self.epsilon
        )

    def _slots(self) -> list[Sequence[Any]]:
        return [self._accumulators]


def _has_part_of_rows(variable: tf.Variable) -> bool:
    spec = shard_spec(variable)
    return spec is not None and spec.column_parts > 1


def _mean_squares(variable: tf.Variable, grads: tf.Tensor) -> tf.Tensor:
    """Returns means of squared gradients over all columns; `[n]`."""
    spec = shard_spec(variable)
    if spec is None or spec.column_parts == 1:
        return tf.reduce_mean(tf.square(grads), axis=1)
    # Ranks that hold other columns of these rows look up the same ids.
    squares = tf.reduce_sum(tf.square(grads), axis=1)
    label = f"{spec.table}/row-wise accumulator"
    return sum_over_ranks(squares, label, spec.row_peers) / spec.dim


KINDS = {
    kind.__name__: kind for kind in (SGD, Adagrad, RowWiseAdagrad, Adam, Ftrl)
}

# Options that apply to all tables and belong to the model's optimizer only.
_OF_THE_MODEL = (
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "weight_decay",
    "use_ema",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


def as_row_optimizer(optimizer: Optimizer, table: str) -> RowOptimizer:
    """Converts a table's `optimizer` to an optimizer of this package.

    Args:
        optimizer: one of `tfdist_ext.optimizers`, a Keras optimizer of the
            same name, its name, or its serialized form.
        table: the table's name, for errors.

    Raises:
        ValueError: if `optimizer` is another one, or has an option that only
            the model's optimizer may have.
    """
    found = row_optimizer(optimizer)
    if found is None:
        raise ValueError(
            f"Table '{table}': `optimizer` must be one of "
            f"tfdist_ext.optimizers ({', '.join(KINDS)}), its Keras "
            f"counterpart, or its name. Received: {optimizer!r}."
        )
    for option in _OF_THE_MODEL:
        value = getattr(found, option, None)
        if value:
            raise ValueError(
                f"Table '{table}': argument `{option}` of its own optimizer "
                "has no effect; give it to the model's, which applies it to "
                f"all tables. Received: {option}={value!r}."
            )
    return found


def row_optimizer(optimizer: Any) -> RowOptimizer | None:
    """Converts what stands for an optimizer of this package.

    Args:
        optimizer: one of `tfdist_ext.optimizers`, a Keras optimizer of the
            same name, its name, or its serialized form.

    Returns:
        The optimizer; None if there is none of this kind.
    """
    if isinstance(optimizer, dict):  # in a config of keras-rs
        optimizer = tf.keras.utils.deserialize_keras_object(optimizer)
    if isinstance(optimizer, RowOptimizer):
        return optimizer
    if isinstance(optimizer, str):
        by_name = {name.lower(): kind for name, kind in KINDS.items()}
        if optimizer.lower() in by_name:
            return by_name[optimizer.lower()]()
    elif isinstance(optimizer, tf.keras.optimizers.Optimizer):
        kind = KINDS.get(type(optimizer).__name__)
        if kind is not None:
            return kind.from_config(optimizer.get_config())
    return None


def attach_optimizer(variable: Variable, optimizer: Optimizer) -> None:
    """Sets the optimizer of one table, instead of the model's.

    The model's optimizer must be one of this package, because it passes the
    gradient on.

    Args:
        variable: the table, a TensorFlow or Keras variable.
        optimizer: the result of `as_row_optimizer`.
    """
    marks.set_own_optimizer(variable, optimizer)


_RULES = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}


def scaled_rate(
    base: float,
    reference_batch: int,
    batch: int,
    rule: str = "linear",
    warmup_steps: int = 0,
) -> float | WarmUp:
    """Returns a learning rate for another global batch size.

    More ranks, with the same number of samples each, make a larger global batch
    and fewer steps per epoch. "linear" suits SGD. "sqrt" suits Adagrad and
    Adam, which divide by the root of summed squares.

    >>> scaled_rate(0.1, reference_batch=1024, batch=8192)
    0.8
    >>> scaled_rate(0.1, reference_batch=1024, batch=4096, rule="sqrt")
    0.2

    Args:
        base: a learning rate that trains well with `reference_batch`.
        reference_batch: samples per step for which `base` is right.
        batch: samples per step of all ranks.
        rule: "linear" multiplies by `batch / reference_batch`, "sqrt" by its
            square root.
        warmup_steps: the number of steps in which the rate changes linearly
            from `base` to the result.

    Returns:
        A float; with `warmup_steps` a Keras `LearningRateSchedule`, which
        returns float32 scalars.

    Raises:
        ValueError: if the rule is not known, or a number is not positive.
    """
    for name, value in (
        ("base", base),
        ("reference_batch", reference_batch),
        ("batch", batch),
    ):
        _check(name, value, value > 0 if _is_number(value) else False)
    whole = isinstance(warmup_steps, numbers.Integral)
    if not whole or warmup_steps < 0:
        raise ValueError(
            "Argument `warmup_steps` must be a whole number of at least 0. "
            f"Received: warmup_steps={warmup_steps!r}."
        )
    if rule not in _RULES:
        raise ValueError(
            f"Argument `rule` must be one of {tuple(_RULES)}. Received: "
            f"rule={rule!r}."
        )
    rate = base * _RULES[rule](batch / reference_batch)
    return WarmUp(base, rate, warmup_steps) if warmup_steps else rate


_Schedule: Any = keras.optimizers.schedules.LearningRateSchedule


@keras.utils.register_keras_serializable(package="tfdist_ext")
class WarmUp(_Schedule):
    """A schedule that changes the rate linearly, and then keeps it constant.

    Args:
        first: the rate of step 0.
        last: the rate from step `steps` on.
        steps: the number of steps in which the rate changes.
    """

    def __init__(self, first: float, last: float, steps: int) -> None:
        super().__init__()
        self.first, self.last, self.steps = first, last, steps

    def __call__(self, step: Scalar) -> tf.Tensor:
        done = tf.cast(step, tf.float32) / float(self.steps)
        return self.first + (self.last - self.first) * tf.minimum(done, 1.0)

    def get_config(self) -> Config:
        """Returns the arguments that create this schedule again."""
        return {"first": self.first, "last": self.last, "steps": self.steps}


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check(name: str, value: float, positive: bool) -> None:
    if not positive or not math.isfinite(value):
        raise ValueError(
            f"Argument `{name}` must be a positive number. Received: "
            f"{name}={value!r}."
        )
