# SPDX-License-Identifier: Apache-2.0
"""Fused row updates of a shard, in place.

Every function takes the table and its slots as float32 resource variables
`[num_rows, dim]`, `rows` int64 `[n]` and `grads` float32 `[n, dim]`. A row
that occurs more than once is updated once, with the sum of its gradients.
Only the given rows change. Hyperparameters are numbers or scalar tensors.

A row outside the table, or a shape that does not fit, is an
`InvalidArgumentError`; nothing has been written then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.ops.library import library


def _scalar(value: Any) -> tf.Tensor:
    # Python numbers straight to float64, so that 1 - 0.999 stays exact.
    if isinstance(value, (int, float)):
        return tf.constant(value, tf.float64)
    return tf.cast(value, tf.float64)


def apply_row_sgd(
    table: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Any,
) -> Any:
    """Applies `w -= learning_rate * g` to the given rows.

    Args:
        table: float32 variable `[num_rows, dim]`.
        rows: int64 `[n]`, local rows.
        grads: float32 `[n, dim]`.
        learning_rate: scalar.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    return library().tfdist_apply_row_sgd(
        table.handle, rows, grads, _scalar(learning_rate)
    )


def apply_row_momentum(
    table: tf.Variable,
    velocity: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Any,
    momentum: Any,
    nesterov: bool = False,
) -> Any:
    """Applies SGD with momentum to the given rows.

    `m = momentum * m - learning_rate * g`, then `w += m`, or with nesterov
    `w += momentum * m - learning_rate * g`. The momentum of a row that is not
    given neither decays nor moves the row.

    Args:
        table: float32 variable `[num_rows, dim]`.
        velocity: slot m, of the shape of the table.
        rows: int64 `[n]`, local rows.
        grads: float32 `[n, dim]`.
        learning_rate: scalar.
        momentum: scalar.
        nesterov: whether to look ahead.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    return library().tfdist_apply_row_momentum(
        table.handle,
        velocity.handle,
        rows,
        grads,
        _scalar(learning_rate),
        _scalar(momentum),
        nesterov=nesterov,
    )


def apply_row_adagrad(
    table: tf.Variable,
    accumulator: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Any,
    epsilon: Any,
) -> Any:
    """Applies `a += g^2; w -= learning_rate * g / sqrt(a + epsilon)`.

    Args:
        table: float32 variable `[num_rows, dim]`.
        accumulator: slot a, of the shape of the table.
        rows: int64 `[n]`, local rows.
        grads: float32 `[n, dim]`.
        learning_rate: scalar.
        epsilon: scalar.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    return library().tfdist_apply_row_adagrad(
        table.handle,
        accumulator.handle,
        rows,
        grads,
        _scalar(learning_rate),
        _scalar(epsilon),
    )


def apply_row_wise_adagrad(
    table: tf.Variable,
    accumulator: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Any,
    epsilon: Any,
    mean_squares: tf.Tensor | None = None,
) -> Any:
    """Applies Adagrad with one accumulator per row: `a += mean(g^2)`.

    Args:
        table: float32 variable `[num_rows, dim]`.
        accumulator: slot a, `[num_rows]`.
        rows: int64 `[n]`, local rows.
        grads: float32 `[n, dim]`.
        learning_rate: scalar.
        epsilon: scalar.
        mean_squares: float32 `[n]`, mean of g^2 of every row where this rank
            holds only some of its columns; rows must then be strictly
            ascending. None computes it from grads.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    if mean_squares is None:
        mean_squares = tf.zeros([0], tf.float32)
    return library().tfdist_apply_row_wise_adagrad(
        table.handle,
        accumulator.handle,
        rows,
        grads,
        mean_squares,
        _scalar(learning_rate),
        _scalar(epsilon),
    )


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
) -> Any:
    """Applies Adam to the given rows ("lazy" Adam).

    `m += (1 - beta_1) (g - m); v += (1 - beta_2) (g^2 - v)`, then
    `w -= learning_rate * c * m / (sqrt(v) + epsilon)` with the bias correction
    `c = sqrt(1 - beta_2^step) / (1 - beta_1^step)`. The moments of rows that
    are not given stay as they are.

    Args:
        table: float32 variable `[num_rows, dim]`.
        momentum: slot m, of the shape of the table.
        velocity: slot v, of the shape of the table.
        rows: int64 `[n]`, local rows.
        grads: float32 `[n, dim]`.
        learning_rate: scalar.
        beta_1: scalar.
        beta_2: scalar.
        epsilon: scalar.
        step: int64 scalar, the global count of updates including this one.
        velocity_hats: one slot, of the shape of the table, that keeps the
            maximum of v (AMSGrad), or none.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    return library().tfdist_apply_row_adam(
        table.handle,
        momentum.handle,
        velocity.handle,
        [hat.handle for hat in velocity_hats],
        rows,
        grads,
        _scalar(learning_rate),
        _scalar(beta_1),
        _scalar(beta_2),
        _scalar(epsilon),
        step,
    )


def sum_duplicate_rows(
    rows: tf.Tensor, grads: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the gradients of equal rows.

    Args:
        rows: int64 `[n]`.
        grads: float32 `[n, dim]`.

    Returns:
        The unique rows in ascending order, int64 `[u]`, and the sums, float32
        `[u, dim]`. Strictly ascending rows are returned without a copy.
    """
    unique_rows, sums = library().tfdist_sum_duplicate_rows(rows, grads)
    return unique_rows, sums


def scale_table(table: tf.Variable, factor: Any) -> Any:
    """Multiplies a table by a factor in place, without a temporary table.

    Args:
        table: float32 variable of any shape.
        factor: scalar.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    return library().tfdist_scale_table(table.handle, _scalar(factor))
