# SPDX-License-Identifier: Apache-2.0
"""Fused updates of a shard's rows, in place.

Every function takes the table, a float32 or bfloat16 resource variable
`[num_rows, dim]`, its slots, float32 variables of that shape, `rows` int64
`[n]` and `grads` float32 `[n, dim]`. A row that occurs more than once is
updated once, with the sum of its gradients. Only the given rows change, except
in exact Adam (`all_rows`) and `scale_table`. Hyperparameters are numbers or
scalar tensors.

A row is computed in float32. In a bfloat16 table it is then rounded. Rounding
to nearest loses changes below 1/512 of a weight. With a `rounding_seed`, a
value is rounded up or down at random, such that the expectation is exact. The
random bits depend on the seed, the row and the column, so pass another seed in
every step.

If a row is outside of the table, or a shape does not fit, the op raises an
`InvalidArgumentError` and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.ops.library import library
from tfdist_ext.type_names import Rate
from tfdist_ext.type_names import Scalar


def _scalar(value: Scalar) -> tf.Tensor:
    # Python numbers are converted to float64, so that 1 - 0.999 stays exact.
    if isinstance(value, (int, float)):
        return tf.constant(value, tf.float64)
    return tf.cast(value, tf.float64)


def _seeds(rounding_seed: tf.Tensor | None) -> list[tf.Tensor]:
    if rounding_seed is None:
        return []
    return [tf.cast(rounding_seed, tf.int64)]


def apply_row_sgd(
    table: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Rate,
    rounding_seed: tf.Tensor | None = None,
) -> tf.Operation:
    """Applies `w -= learning_rate * g` to the given rows.

    Args:
        table: float32 or bfloat16 variable `[num_rows, dim]`.
        rows: int64 `[n]`, local rows.
        grads: float32 `[n, dim]`.
        learning_rate: scalar.
        rounding_seed: int64 scalar; None rounds bfloat16 to nearest.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    return library().tfdist_apply_row_sgd(
        table.handle,
        rows,
        grads,
        _scalar(learning_rate),
        _seeds(rounding_seed),
    )


def apply_row_momentum(
    table: tf.Variable,
    velocity: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Rate,
    momentum: Scalar,
    nesterov: bool = False,
    rounding_seed: tf.Tensor | None = None,
) -> tf.Operation:
    """Applies SGD with momentum to the given rows.

    `m = momentum * m - learning_rate * g`, then `w += m`, or with nesterov
    `w += momentum * m - learning_rate * g`. For other rows, neither the
    momentum nor the weights change.

    Args:
        table: float32 or bfloat16 variable `[num_rows, dim]`.
        velocity: slot m, of the shape of the table.
        rows: int64 `[n]`, local rows.
        grads: float32 `[n, dim]`.
        learning_rate: scalar.
        momentum: scalar.
        nesterov: whether to use Nesterov momentum.
        rounding_seed: int64 scalar; None rounds bfloat16 to nearest.

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
        _seeds(rounding_seed),
        nesterov=nesterov,
    )


def apply_row_adagrad(
    table: tf.Variable,
    accumulator: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Rate,
    epsilon: Scalar,
    rounding_seed: tf.Tensor | None = None,
) -> tf.Operation:
    """Applies `a += g^2; w -= learning_rate * g / sqrt(a + epsilon)`.

    Args:
        table: float32 or bfloat16 variable `[num_rows, dim]`.
        accumulator: slot a, of the shape of the table.
        rows: int64 `[n]`, local rows.
        grads: float32 `[n, dim]`.
        learning_rate: scalar.
        epsilon: scalar.
        rounding_seed: int64 scalar; None rounds bfloat16 to nearest.

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
        _seeds(rounding_seed),
    )


def apply_row_wise_adagrad(
    table: tf.Variable,
    accumulator: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Rate,
    epsilon: Scalar,
    mean_squares: tf.Tensor | None = None,
    rounding_seed: tf.Tensor | None = None,
) -> tf.Operation:
    """Applies Adagrad with one accumulator per row: `a += mean(g^2)`.

    Args:
        table: float32 or bfloat16 variable `[num_rows, dim]`.
        accumulator: slot a, `[num_rows]`.
        rows: int64 `[n]`, local rows.
        grads: float32 `[n, dim]`.
        learning_rate: scalar.
        epsilon: scalar.
        mean_squares: float32 `[n]`, the mean of g^2 over all columns of every
            row, if this rank holds only some columns; rows must then be
            strictly ascending. None computes it from grads.
        rounding_seed: int64 scalar; None rounds bfloat16 to nearest.

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
        _seeds(rounding_seed),
    )


def apply_row_adam(
    table: tf.Variable,
    momentum: tf.Variable,
    velocity: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Rate,
    beta_1: Scalar,
    beta_2: Scalar,
    epsilon: Scalar,
    step: tf.Tensor,
    velocity_hats: Sequence[tf.Variable] = (),
    all_rows: bool = False,
    rounding_seed: tf.Tensor | None = None,
) -> tf.Operation:
    """Applies Adam to the given rows ("lazy" Adam).

    `m += (1 - beta_1) (g - m); v += (1 - beta_2) (g^2 - v)`, then
    `w -= learning_rate * c * m / (sqrt(v) + epsilon)` with the bias correction
    `c = sqrt(1 - beta_2^step) / (1 - beta_1^step)`. The moments of other rows
    do not change, unless `all_rows` is set.

    Args:
        table: float32 or bfloat16 variable `[num_rows, dim]`.
        momentum: slot m, of the shape of the table.
        velocity: slot v, of the shape of the table.
        rows: int64 `[n]`, local rows.
        grads: float32 `[n, dim]`.
        learning_rate: scalar.
        beta_1: scalar.
        beta_2: scalar.
        epsilon: scalar.
        step: int64 scalar, the global count of updates including this one.
        velocity_hats: one slot of the shape of the table for the maximum of v
            (AMSGrad), or none.
        all_rows: whether to update other rows too, with a gradient of zero, in
            one pass over the table: the result is that of Keras's dense Adam.
        rounding_seed: int64 scalar; None rounds bfloat16 to nearest.

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
        _seeds(rounding_seed),
        all_rows=all_rows,
    )


def apply_row_ftrl(
    table: tf.Variable,
    accumulator: tf.Variable,
    linear: tf.Variable,
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    learning_rate: Rate,
    learning_rate_power: Scalar = -0.5,
    l1: Scalar = 0.0,
    l2: Scalar = 0.0,
    l2_shrinkage: Scalar = 0.0,
    beta: Scalar = 0.0,
    rounding_seed: tf.Tensor | None = None,
) -> tf.Operation:
    """Applies Keras's Ftrl ("follow the regularized leader") to the given rows.

    With `p(x) = x^-learning_rate_power` and `l = l2 + beta / (2
    learning_rate)`:

        s = (p(n + g^2) - p(n)) / learning_rate;  n += g^2
        z += g + 2 * l2_shrinkage * w - s * w
        w = (clip(z, -l1, l1) - z) / (p(n) / learning_rate + 2 * l)

    A power of -0.5 is fastest, because it is a square root.

    Args:
        table: float32 or bfloat16 variable `[num_rows, dim]`.
        accumulator: slot n, of the shape of the table.
        linear: slot z, of the shape of the table.
        rows: int64 `[n]`, local rows.
        grads: float32 `[n, dim]`.
        learning_rate: scalar.
        learning_rate_power: scalar, zero or negative.
        l1: scalar, zero or positive.
        l2: scalar, zero or positive.
        l2_shrinkage: scalar, zero or positive.
        beta: scalar, zero or positive.
        rounding_seed: int64 scalar; None rounds bfloat16 to nearest.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    return library().tfdist_apply_row_ftrl(
        table.handle,
        accumulator.handle,
        linear.handle,
        rows,
        grads,
        *map(
            _scalar,
            (learning_rate, learning_rate_power, l1, l2, l2_shrinkage, beta),
        ),
        _seeds(rounding_seed),
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


def clip_rows(
    table: tf.Variable,
    rows: tf.Tensor,
    *,
    max_norm: Scalar,
    squares: tf.Tensor | None = None,
    rounding_seed: tf.Tensor | None = None,
) -> tf.Operation:
    """Scales rows whose norm exceeds a limit down to that limit.

    Args:
        table: float32 or bfloat16 variable `[num_rows, dim]`.
        rows: int64 `[n]`, local rows, each once, in any order.
        max_norm: scalar, the largest Euclidean norm.
        squares: float32 `[n]`, the sum of squares over all columns of every
            row, if this rank holds only some columns. None computes it.
        rounding_seed: int64 scalar; None rounds bfloat16 to nearest.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    if squares is None:
        squares = tf.zeros([0], tf.float32)
    return library().tfdist_clip_rows(
        table.handle, rows, squares, _scalar(max_norm), _seeds(rounding_seed)
    )


def scale_table(
    table: tf.Variable,
    factor: Scalar,
    *,
    rounding_seed: tf.Tensor | None = None,
) -> tf.Operation:
    """Multiplies a table by a factor in place, without a temporary table.

    Args:
        table: float32 or bfloat16 variable of any shape.
        factor: scalar.
        rounding_seed: int64 scalar; None rounds bfloat16 to nearest.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    return library().tfdist_scale_table(
        table.handle, _scalar(factor), _seeds(rounding_seed)
    )
