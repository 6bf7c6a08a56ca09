# SPDX-License-Identifier: Apache-2.0
"""Rows of tables kept from growing long, after each update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.collectives.sums import sum_over_ranks
from tfdist_ext.ops import optimizer_ops
from tfdist_ext.optimizers.kernels import has_kernel
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold

keras = tf.keras


def limit(variable: Any, max_norm: float) -> None:
    """Says how long the rows of a table may be.

    From now on optimizers that would not heed it are refused.

    Args:
        variable: the table, of TensorFlow or Keras.
        max_norm: the largest Euclidean norm.
    """
    marks.set_max_norm(variable, max_norm)
    hold(Need.MAX_NORM, variable)


def clip(
    variable: tf.Variable, rows: tf.Tensor, max_norm: float, seed: Any
) -> None:
    """Scales rows that are longer down to a norm.

    Where the columns of a row are on several ranks, their squares are summed
    over these, which costs one exchange of a value per row.

    Args:
        variable: the table or this rank's part of it, `[num_rows, dim]`.
        rows: int64 `[n]`, local rows, each once, on all ranks of a row in the
            same order.
        max_norm: the largest Euclidean norm.
        seed: for rounding to bfloat16 at random, or None.
    """
    spec = marks.shard_spec(variable)
    whole_rows = spec is None or spec.column_parts == 1
    squares = None
    if not (whole_rows and has_kernel(variable)):
        values = tf.cast(tf.gather(variable, rows), tf.float32)
        squares = tf.reduce_sum(tf.square(values), axis=1)
    if spec is not None and not whole_rows:
        label = f"{spec.table}/norms of rows"
        squares = sum_over_ranks(squares, label, spec.row_peers)
    if has_kernel(variable):
        optimizer_ops.clip_rows(
            variable,
            rows,
            max_norm=max_norm,
            squares=squares,
            rounding_seed=seed,
        )
        return
    norms = tf.sqrt(squares)
    longer = tf.where(norms > max_norm)[:, 0]
    excess = 1 - max_norm / tf.gather(norms, longer)
    excess = excess[:, tf.newaxis] * tf.gather(values, longer)
    excess = tf.cast(excess, variable.dtype)
    variable.scatter_sub(tf.IndexedSlices(excess, tf.gather(rows, longer)))


def refuse_at_build(
    original: Any, optimizer: Any, variables: Sequence[Any], *args: Any
) -> Any:
    _refuse(optimizer, variables)
    return original(optimizer, variables, *args)


def refuse_at_apply(
    original: Any, optimizer: Any, pairs: Any, *args: Any, **kwargs: Any
) -> Any:
    pairs = list(pairs)
    _refuse(optimizer, [variable for _, variable in pairs])
    return original(optimizer, pairs, *args, **kwargs)


def _refuse(optimizer: Any, variables: Sequence[Any]) -> None:
    """Refuses an optimizer that would let rows of some table grow."""
    # That of a loss scale hands all on to another.
    inner = hasattr(optimizer, "inner_optimizer")
    if inner or marks.does_work_over_ranks(optimizer):
        return
    for variable in variables:
        longest = marks.max_norm(variable)
        if longest is not None:
            kind = type(optimizer).__name__
            raise ValueError(
                f"Table '{variable.name}' has max_norm={longest:g}, which "
                f"{type(optimizer).__module__}.{kind} would ignore. Give the "
                "model an optimizer of tfdist_ext.optimizers, or leave out "
                "`max_norm`."
            )
