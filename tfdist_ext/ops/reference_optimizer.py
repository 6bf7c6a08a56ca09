# SPDX-License-Identifier: Apache-2.0
"""The functions of `optimizer_ops.py`, made of stock TensorFlow ops.

The oracle in the tests: same signatures, several passes and no checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def sum_duplicate_rows(
    rows: tf.Tensor, grads: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """See `optimizer_ops.sum_duplicate_rows`."""
    order = tf.argsort(rows, stable=True)
    unique_rows, groups = tf.unique(tf.gather(rows, order))
    sums = tf.math.segment_sum(tf.gather(grads, order), groups)
    return unique_rows, sums


def apply_row_sgd(
    table: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Any,
) -> None:
    """See `optimizer_ops.apply_row_sgd`."""
    _add(table, rows, -learning_rate * grads)


def apply_row_momentum(
    table: tf.Variable,
    velocity: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Any,
    momentum: Any,
    nesterov: bool = False,
) -> None:
    """See `optimizer_ops.apply_row_momentum`."""
    rows, grads = sum_duplicate_rows(rows, grads)
    step = -learning_rate * grads
    m = momentum * tf.gather(velocity, rows) + step
    _set(velocity, rows, m)
    _add(table, rows, momentum * m + step if nesterov else m)


def apply_row_adagrad(
    table: tf.Variable,
    accumulator: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Any,
    epsilon: Any,
) -> None:
    """See `optimizer_ops.apply_row_adagrad`."""
    rows, grads = sum_duplicate_rows(rows, grads)
    _add(accumulator, rows, tf.square(grads))
    root = tf.sqrt(tf.gather(accumulator, rows) + epsilon)
    _add(table, rows, -learning_rate * grads / root)


def apply_row_wise_adagrad(
    table: tf.Variable,
    accumulator: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Any,
    epsilon: Any,
    mean_squares: tf.Tensor | None = None,
) -> None:
    """See `optimizer_ops.apply_row_wise_adagrad`."""
    rows, grads = sum_duplicate_rows(rows, grads)
    if mean_squares is None:
        mean_squares = tf.reduce_mean(tf.square(grads), axis=1)
    _add(accumulator, rows, mean_squares)
    root = tf.sqrt(tf.gather(accumulator, rows) + epsilon)
    _add(table, rows, -learning_rate * grads / root[:, tf.newaxis])


def apply_row_adam(
    table: tf.Variable,
    momentum: tf.Variable,
    velocity: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Any,
    beta_1: Any,
    beta_2: Any,
    epsilon: Any,
    step: tf.Tensor,
    velocity_hats: Sequence[tf.Variable] = (),
) -> None:
    """See `optimizer_ops.apply_row_adam`."""
    rows, grads = sum_duplicate_rows(rows, grads)
    m = tf.gather(momentum, rows)
    v = tf.gather(velocity, rows)
    m += (grads - m) * (1 - beta_1)
    v += (tf.square(grads) - v) * (1 - beta_2)
    _set(momentum, rows, m)
    _set(velocity, rows, v)
    for hat in velocity_hats:
        v = tf.maximum(tf.gather(hat, rows), v)
        _set(hat, rows, v)
    # As constants: tf.cast would take the numbers through float32.
    first, second = (tf.constant(b, tf.float64) for b in (beta_1, beta_2))
    count = tf.cast(step, tf.float64)
    correction = tf.sqrt(1 - second**count) / (1 - first**count)
    alpha = tf.cast(learning_rate * correction, grads.dtype)
    _add(table, rows, -alpha * m / (tf.sqrt(v) + epsilon))


def scale_table(table: tf.Variable, factor: Any) -> None:
    """See `optimizer_ops.scale_table`."""
    table.assign(table * factor)


def _add(variable: tf.Variable, rows: tf.Tensor, values: tf.Tensor) -> None:
    variable.scatter_add(tf.IndexedSlices(values, rows))


def _set(variable: tf.Variable, rows: tf.Tensor, values: tf.Tensor) -> None:
    variable.scatter_update(tf.IndexedSlices(values, rows))
