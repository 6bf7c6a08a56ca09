# SPDX-License-Identifier: Apache-2.0
"""Fused updates of a shard's rows, in place.

A `RowRule` says how an optimizer updates a row. `update_rows` applies it to
given rows, `update_looked_up_rows` to the rows of a lookup, whose gradients it
computes. Only these rows change, except in exact Adam (`all_rows`) and
`scale_table`. Hyperparameters are numbers or scalar tensors.

A row is computed in float32. In a bfloat16 table it is then rounded. Rounding
to nearest loses changes below 1/512 of a weight. With a seed, a value is
rounded up or down at random, such that the expectation is exact. The random
bits depend on the seed, the row and the column, so pass another seed in every
step.

If a row is outside of the table, or a shape does not fit, the op raises an
`InvalidArgumentError` and writes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class RowRule:
    """The update of a row by an optimizer, made by `sgd`, `adam` and so on.

    Attributes:
        op: the optimizer, as in the names of the ops.
        numbers: hyperparameters, scalar tensors in the order of the op.
        options: attributes of the op.
    """

    op: str
    numbers: tuple[tf.Tensor, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def sgd(*, learning_rate: Rate) -> RowRule:
    """Makes `w -= learning_rate * g`. It has no slots."""
    return RowRule("sgd", (_scalar(learning_rate),))


def momentum(
    *, learning_rate: Rate, momentum: Scalar, nesterov: bool = False
) -> RowRule:
    """Makes SGD with momentum, whose slot is the momentum m.

    `m = momentum * m - learning_rate * g`, then `w += m`, or with nesterov
    `w += momentum * m - learning_rate * g`. For other rows, neither the
    momentum nor the weights change.
    """
    numbers = (_scalar(learning_rate), _scalar(momentum))
    return RowRule("momentum", numbers, {"nesterov": nesterov})


def adagrad(*, learning_rate: Rate, epsilon: Scalar) -> RowRule:
    """Makes `a += g^2; w -= learning_rate * g / sqrt(a + epsilon)`; slot a."""
    return RowRule("adagrad", (_scalar(learning_rate), _scalar(epsilon)))


def row_wise_adagrad(*, learning_rate: Rate, epsilon: Scalar) -> RowRule:
    """Makes Adagrad with one accumulator per row: `a += mean(g^2)`.

    The slot a is `[num_rows]`.
    """
    return RowRule(
        "row_wise_adagrad", (_scalar(learning_rate), _scalar(epsilon))
    )


def adam(
    *,
    learning_rate: Rate,
    beta_1: Scalar,
    beta_2: Scalar,
    epsilon: Scalar,
    step: tf.Tensor,
    all_rows: bool = False,
) -> RowRule:
    """Makes Adam of the given rows ("lazy" Adam).

    `m += (1 - beta_1) (g - m); v += (1 - beta_2) (g^2 - v)`, then
    `w -= learning_rate * c * m / (sqrt(v) + epsilon)` with the bias correction
    `c = sqrt(1 - beta_2^step) / (1 - beta_1^step)`. The moments of other rows
    do not change, unless `all_rows` is set. The slots are m and v, and for
    AMSGrad the maximum of v.

    Args:
        learning_rate: scalar.
        beta_1: scalar.
        beta_2: scalar.
        epsilon: scalar.
        step: int64 scalar, the global count of updates including this one.
        all_rows: whether to update other rows too, with a gradient of zero, in
            one pass over the table: the result is that of Keras's dense Adam.
    """
    numbers = map(_scalar, (learning_rate, beta_1, beta_2, epsilon))
    options = {"all_rows": True} if all_rows else {}
    return RowRule("adam", (*numbers, step), options)


def ftrl(
    *,
    learning_rate: Rate,
    learning_rate_power: Scalar = -0.5,
    l1: Scalar = 0.0,
    l2: Scalar = 0.0,
    l2_shrinkage: Scalar = 0.0,
    beta: Scalar = 0.0,
) -> RowRule:
    """Makes Keras's Ftrl ("follow the regularized leader").

    With `p(x) = x^-learning_rate_power` and `l = l2 + beta / (2
    learning_rate)`:

        s = (p(n + g^2) - p(n)) / learning_rate;  n += g^2
        z += g + 2 * l2_shrinkage * w - s * w
        w = (clip(z, -l1, l1) - z) / (p(n) / learning_rate + 2 * l)

    A power of -0.5 is fastest, because it is a square root. The slots are n
    and z.

    Args:
        learning_rate: scalar.
        learning_rate_power: scalar, zero or negative.
        l1: scalar, zero or positive.
        l2: scalar, zero or positive.
        l2_shrinkage: scalar, zero or positive.
        beta: scalar, zero or positive.
    """
    numbers = learning_rate, learning_rate_power, l1, l2, l2_shrinkage, beta
    return RowRule("ftrl", tuple(map(_scalar, numbers)))


def update_rows(
    rule: RowRule,
    table: tf.Variable,
    slots: Sequence[tf.Variable | tf.Tensor],
    rows: tf.Tensor,
    grads: tf.Tensor,
    *,
    mean_squares: tf.Tensor | None = None,
    rounding_seed: tf.Tensor | None = None,
) -> tf.Operation:
    """Updates the given rows of a table.

    A row that occurs more than once is updated once, with the sum of its
    gradients.

    Args:
        rule: the update.
        table: float32 or bfloat16 variable `[num_rows, dim]`.
        slots: float32 variables of the shape of the table, or their handles,
            in the order of the rule; `[num_rows]` for row-wise Adagrad.
        rows: int64 `[n]`, local rows.
        grads: float32 `[n, dim]`.
        mean_squares: for row-wise Adagrad if this rank holds only some of the
            columns: float32 `[n]`, the mean of g^2 over all columns of every
            row; rows must then be strictly ascending.
        rounding_seed: int64 scalar; None rounds bfloat16 to nearest.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    more = []
    if rule.op == "row_wise_adagrad":
        more = [tf.zeros([0]) if mean_squares is None else mean_squares]
    name = f"tfdist_apply_row_{rule.op.removeprefix('row_')}"
    return getattr(library(), name)(
        table.handle,
        *_slot_inputs(rule, [[_handle(slot)] for slot in slots], single=True),
        rows,
        grads,
        *more,
        *rule.numbers,
        _seeds(rounding_seed),
        **rule.options,
    )


def update_looked_up_rows(
    rule: RowRule,
    tables: Sequence[tf.Variable],
    slots: Sequence[Sequence[tf.Variable | tf.Tensor]],
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
    served: tf.Tensor,
    grad: tf.Tensor,
    *,
    feature_tables: Sequence[int],
    rounding_seeds: Sequence[tf.Tensor] = (),
) -> tf.Operation:
    """Updates the rows that a lookup has read, in all of its tables.

    The result is that of `lookup_ops.lookup_grad` followed by `update_rows`,
    bit for bit. Gradients of rows stay in the processor's cache.

    Args:
        rule: the update, without `all_rows`.
        tables: float32 or bfloat16 variables `[num_rows, dim]`.
        slots: the slots of every table, as for `update_rows`.
        row_splits: see `lookup_ops.lookup_grad`; so are the next four.
        rows: int64 `[n]`.
        weights: float32 `[n]`, or `[0]`.
        served: int64 `[world_size, F]`.
        grad: float32 `[V]`.
        feature_tables: index of every feature's table, or -1.
        rounding_seeds: int64 scalar of every table; none rounds bfloat16 to
            nearest.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    handles = [
        [_handle(slot) for slot in each] for each in zip(*slots, strict=True)
    ]
    return getattr(library(), f"tfdist_apply_lookup_grad_{rule.op}")(
        row_splits,
        rows,
        weights,
        served,
        grad,
        [table.handle for table in tables],
        *_slot_inputs(rule, handles, single=False),
        *rule.numbers,
        [tf.cast(seed, tf.int64) for seed in rounding_seeds],
        feature_tables=list(feature_tables),
        **rule.options,
    )


def _handle(variable: tf.Variable | tf.Tensor) -> tf.Tensor:
    return getattr(variable, "handle", variable)


def _slot_inputs(
    rule: RowRule, handles: list[list[tf.Tensor]], *, single: bool
) -> list[Any]:
    """Returns the slots as inputs of an op.

    Args:
        rule: the update.
        handles: for each slot, the handles of all tables.
        single: whether the op has a single table.
    """
    own = handles[:2] if rule.op == "adam" else handles
    inputs: list[Any] = [each[0] if single else each for each in own]
    if rule.op == "adam":  # the maximum of v is a list of any length
        inputs.append(handles[2] if len(handles) > 2 else [])
    return inputs


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
