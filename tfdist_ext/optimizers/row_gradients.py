# SPDX-License-Identifier: Apache-2.0
"""Gradients of partitioned tables: repeated rows and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm.exchanges import sum_over_ranks
from tfdist_ext.marks import shard_spec
from tfdist_ext.ops import optimizer_ops
from tfdist_ext.tables.placement import ShardSpec


def without_duplicates(grad: Any) -> Any:
    """Sums the values of equal rows, whose squares would be wrong alone.

    A tape concatenates the gradients of a layer that was called twice.

    Args:
        grad: IndexedSlices, or anything convertible to a tensor.

    Returns:
        IndexedSlices with every index once and the very `dense_shape` of
        `grad`, which carries the mark of a shard's gradient; or a tensor.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return tf.convert_to_tensor(grad)
    if grad.values.shape.rank == 2 and grad.values.dtype == tf.float32:
        rows, values = optimizer_ops.sum_duplicate_rows(
            tf.cast(grad.indices, tf.int64), grad.values
        )
        rows = tf.cast(rows, grad.indices.dtype)
        return tf.IndexedSlices(values, rows, grad.dense_shape)
    rows, positions = tf.unique(grad.indices)
    values = tf.math.unsorted_segment_sum(grad.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, grad.dense_shape)


GradsAndVars = Sequence[tuple[Any, Any]]


def clip_gradients(
    grads_and_vars: GradsAndVars,
    *,
    clipnorm: float | None = None,
    global_clipnorm: float | None = None,
    clipvalue: float | None = None,
) -> list[tuple[Any, Any]]:
    """Clips gradients by the first option that is set.

    Args:
        grads_and_vars: pairs of a gradient (tensor, IndexedSlices or None),
            summed over the ranks, and its variable.
        clipnorm: largest norm of each gradient.
        global_clipnorm: largest norm of all gradients together.
        clipvalue: largest absolute value of an element.

    Returns:
        The pairs with clipped gradients; IndexedSlices keep their
        `dense_shape` and have each row once.
    """
    pairs = list(grads_and_vars)
    if not (clipnorm or global_clipnorm or clipvalue):
        return pairs
    kept = [i for i, (grad, _) in enumerate(pairs) if grad is not None]
    grads = [without_duplicates(pairs[i][0]) for i in kept]
    if clipnorm or global_clipnorm:
        specs = [shard_spec(pairs[i][1]) for i in kept]
        norms = square_norms(grads, specs)
        if clipnorm:
            factors = [
                clipnorm / tf.maximum(tf.sqrt(n), clipnorm) for n in norms
            ]
        else:
            factors = [_global_factor(norms, global_clipnorm)] * len(grads)
        clipped = [_scale(g, f) for g, f in zip(grads, factors, strict=True)]
    else:
        clipped = [_clip_values(grad, clipvalue) for grad in grads]
    for i, grad in zip(kept, clipped, strict=True):
        pairs[i] = (grad, pairs[i][1])
    return pairs


def _global_factor(square_norms: Sequence[tf.Tensor], limit: Any) -> tf.Tensor:
    norm = tf.sqrt(tf.add_n(square_norms))
    factor = limit * tf.minimum(1 / norm, 1 / limit)
    # NaN for a norm that is not finite, as Keras: 0 * inf would hide it.
    return factor + (norm - norm)


def _scale(grad: Any, factor: tf.Tensor) -> Any:
    return _map(lambda values: values * tf.cast(factor, values.dtype), grad)


def _clip_values(grad: Any, limit: Any) -> Any:
    return _map(lambda v: tf.clip_by_value(v, -limit, limit), grad)


def _map(fn: Any, grad: Any) -> Any:
    if not isinstance(grad, tf.IndexedSlices):
        return fn(grad)
    # The very dense_shape tensor: it carries the mark of a shard's gradient.
    return tf.IndexedSlices(fn(grad.values), grad.indices, grad.dense_shape)


def _square_norm(grad: Any) -> tf.Tensor:
    """Sums the squares of this rank's part."""
    values = tf.cast(getattr(grad, "values", grad), tf.float32)
    return tf.reduce_sum(tf.square(values))


def square_norms(
    grads: Sequence[Any], specs: Sequence[ShardSpec | None]
) -> list[tf.Tensor]:
    """Sums of squares of whole gradients, bitwise equal on all ranks.

    Args:
        grads: tensors, or IndexedSlices in which each row occurs once.
        specs: of the shard that each is the gradient of, None for no shard.
    """
    local = [_square_norm(grad) for grad in grads]
    if not any(spec is not None and spec.partitioned for spec in specs):
        return local
    # Dense gradients are equal on all ranks, but a sum of squares depends on
    # the number of threads that made it. Their mean over the ranks does not,
    # and keeps dense weights bitwise equal. The 1 counts the ranks.
    totals = tf.unstack(
        sum_over_ranks(tf.stack([tf.ones([]), *local]), "gradient norms"),
        num=1 + len(local),
    )
    return [
        total if spec is not None else total / totals[0]
        for total, spec in zip(totals[1:], specs, strict=True)
    ]


def sum_repeated_rows(
    original: Any, optimizer: Any, grads: Sequence[Any], *args: Any, **kw: Any
) -> Any:
    """Sums what several calls give to a row, as several ranks do.

    A tape concatenates the gradients, and Keras 3 would square each.
    """
    return original(optimizer, list(map(_summed, grads)), *args, **kw)


def _summed(grad: Any) -> Any:
    if not (isinstance(grad, tf.IndexedSlices) and marks.is_unique(grad)):
        return grad
    if marks.gradient_spec(grad) is not None:  # of a shard: summed with others
        return grad
    if tf.is_symbolic_tensor(grad.indices):
        # Of one call, every row is there once.
        calls = grad.indices.op.type.startswith("Concat")
        return without_duplicates(grad) if calls else grad
    return without_duplicates(grad)
