# SPDX-License-Identifier: Apache-2.0
"""The functions of `optimizer_ops.py`, made of stock TensorFlow ops.

The oracle in the tests: same signatures, several passes and no checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tests.reference import rounding as rounding
from tfdist_ext.ops.optimizer_ops import RowRule


def sum_duplicate_rows(
    rows: tf.Tensor, grads: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """See `optimizer_ops.sum_duplicate_rows`."""
    order = tf.argsort(rows, stable=True)
    unique_rows, groups = tf.unique(tf.gather(rows, order))
    sums = tf.math.segment_sum(tf.gather(grads, order), groups)
    return unique_rows, sums


def update_rows(
    rule: RowRule,
    table: tf.Variable,
    slots: Sequence[tf.Variable],
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    mean_squares: tf.Tensor | None = None,
    rounding_seed: Any = None,
) -> None:
    """See `optimizer_ops.update_rows`."""
    rows, grads = sum_duplicate_rows(rows, grads)
    options = {"rounding_seed": rounding_seed, **rule.options}
    if mean_squares is not None:
        options["mean_squares"] = mean_squares
    _UPDATES[rule.op](
        table, *slots, rows, grads, *map(_number, rule.numbers), **options
    )


def _number(tensor: tf.Tensor) -> Any:
    """A number that TensorFlow multiplies with float32 values."""
    return tensor.numpy().item()


def _sgd(
    table: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    learning_rate: Any,
    *,
    rounding_seed: Any,
) -> None:
    _move(table, rows, -learning_rate * grads, rounding_seed)


def _momentum(
    table: tf.Variable,
    velocity: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    learning_rate: Any,
    momentum: Any,
    *,
    nesterov: bool,
    rounding_seed: Any,
) -> None:
    step = -learning_rate * grads
    m = momentum * tf.gather(velocity, rows) + step
    _set(velocity, rows, m)
    _move(table, rows, momentum * m + step if nesterov else m, rounding_seed)


def _adagrad(
    table: tf.Variable,
    accumulator: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    learning_rate: Any,
    epsilon: Any,
    *,
    rounding_seed: Any,
) -> None:
    _add(accumulator, rows, tf.square(grads))
    root = tf.sqrt(tf.gather(accumulator, rows) + epsilon)
    _move(table, rows, -learning_rate * grads / root, rounding_seed)


def _row_wise_adagrad(
    table: tf.Variable,
    accumulator: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    learning_rate: Any,
    epsilon: Any,
    *,
    mean_squares: tf.Tensor | None = None,
    rounding_seed: Any,
) -> None:
    if mean_squares is None:
        mean_squares = tf.reduce_mean(tf.square(grads), axis=1)
    _add(accumulator, rows, mean_squares)
    root = tf.sqrt(tf.gather(accumulator, rows) + epsilon)
    _move(
        table, rows, -learning_rate * grads / root[:, tf.newaxis], rounding_seed
    )


def _adam(
    table: tf.Variable,
    momentum: tf.Variable,
    velocity: tf.Variable,
    *more: Any,
    all_rows: bool = False,
    rounding_seed: Any,
) -> None:
    """`more`: for AMSGrad the maximum of v; rows, grads and numbers."""
    *hats, rows, grads, learning_rate, beta_1, beta_2, epsilon, step = more
    if all_rows:
        shape = tf.shape(table, tf.int64)
        grads = tf.scatter_nd(rows[:, tf.newaxis], grads, shape)
        rows = tf.range(shape[0])
    m = tf.gather(momentum, rows)
    v = tf.gather(velocity, rows)
    m += (grads - m) * (1 - beta_1)
    v += (tf.square(grads) - v) * (1 - beta_2)
    _set(momentum, rows, m)
    _set(velocity, rows, v)
    for hat in hats:
        v = tf.maximum(tf.gather(hat, rows), v)
        _set(hat, rows, v)
    # As constants: tf.cast would take the numbers through float32.
    first, second = (tf.constant(b, tf.float64) for b in (beta_1, beta_2))
    count = tf.cast(step, tf.float64)
    correction = tf.sqrt(1 - second**count) / (1 - first**count)
    alpha = tf.cast(learning_rate * correction, grads.dtype)
    _move(table, rows, -alpha * m / (tf.sqrt(v) + epsilon), rounding_seed)


def _ftrl(
    table: tf.Variable,
    accumulator: tf.Variable,
    linear: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    learning_rate: Any,
    learning_rate_power: Any,
    l1: Any,
    l2: Any,
    l2_shrinkage: Any,
    beta: Any,
    *,
    rounding_seed: Any,
) -> None:
    w = tf.cast(tf.gather(table, rows), tf.float32)
    before = tf.gather(accumulator, rows)
    after = before + tf.square(grads)
    power = tf.pow(after, -learning_rate_power)
    sigma = (power - tf.pow(before, -learning_rate_power)) / learning_rate
    z = tf.gather(linear, rows)
    z += grads + 2 * l2_shrinkage * w - sigma * w
    _set(accumulator, rows, after)
    _set(linear, rows, z)
    quadratic = power / learning_rate + 2 * l2 + beta / learning_rate
    leader = (tf.clip_by_value(z, -l1, l1) - z) / quadratic
    _replace(table, rows, leader, rounding_seed)


_UPDATES = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "row_wise_adagrad": _row_wise_adagrad,
    "adam": _adam,
    "ftrl": _ftrl,
}


def clip_rows(
    table: tf.Variable,
    rows: tf.Tensor,
    *,
    max_norm: Any,
    squares: tf.Tensor | None = None,
    rounding_seed: Any = None,
) -> None:
    """See `optimizer_ops.clip_rows`."""
    weights = tf.cast(tf.gather(table, rows), tf.float32)
    if squares is None:
        squares = tf.reduce_sum(tf.square(weights), axis=1)
    norms = tf.sqrt(squares)
    longer = tf.where(norms > max_norm)[:, 0]
    excess = 1 - max_norm / tf.gather(norms, longer)
    step = -excess[:, tf.newaxis] * tf.gather(weights, longer)
    _move(table, tf.gather(rows, longer), step, rounding_seed)


def scale_table(
    table: tf.Variable, factor: Any, *, rounding_seed: Any = None
) -> None:
    """See `optimizer_ops.scale_table`."""
    scaled = tf.cast(table, tf.float32) * factor
    if table.dtype == tf.bfloat16:
        rows = tf.range(scaled.shape[0] if scaled.shape.rank else 1)
        matrix = tf.reshape(scaled, [len(rows), -1])
        rounded = rounding.to_bfloat16(matrix, rows, rounding_seed)
        scaled = tf.reshape(rounded, scaled.shape)
    table.assign(scaled)


def _move(
    table: tf.Variable, rows: tf.Tensor, step: tf.Tensor, seed: Any
) -> None:
    weights = tf.cast(tf.gather(table, rows), tf.float32)
    _replace(table, rows, weights + step, seed)


def _replace(
    table: tf.Variable, rows: tf.Tensor, weights: tf.Tensor, seed: Any
) -> None:
    if table.dtype == tf.bfloat16:
        weights = rounding.to_bfloat16(weights, rows, seed)
    _set(table, rows, weights)


def _add(variable: tf.Variable, rows: tf.Tensor, values: tf.Tensor) -> None:
    variable.scatter_add(tf.IndexedSlices(values, rows))


def _set(variable: tf.Variable, rows: tf.Tensor, values: tf.Tensor) -> None:
    variable.scatter_update(tf.IndexedSlices(values, rows))
