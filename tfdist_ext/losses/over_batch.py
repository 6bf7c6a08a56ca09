# SPDX-License-Identifier: Apache-2.0
"""Means, sums and rows of the whole batch, for losses written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.batches import whole_batch
from tfdist_ext.batches import whole_rows
from tfdist_ext.collectives import any_dtype
from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.keras_internals import is_shape_inference
from tfdist_ext.keras_internals import is_symbolic_build

Nest = Any

# Sums of narrower numbers are rounded, or overflow.
_NARROW = (tf.float16, tf.bfloat16)


def batch_mean(values: Any, weights: Any = None) -> tf.Tensor:
    """The mean of values of all samples of the batch, on every rank.

    `sum(weights * values) / sum(weights)` over the samples of all ranks, and 0
    where nothing counts. Every rank gets one process's number, whatever part
    of the batch it has; in one process and outside of a step it is the plain
    mean.

    >>> float(batch_mean([1.0, 2.0, 6.0]))
    3.0
    >>> float(batch_mean([1.0, 2.0, 6.0], weights=[1.0, 1.0, 0.0]))
    1.5

    In a `train_step`, differentiate it as it is:

        losses = tf.square(labels - predictions)
        loss = tfdist_ext.losses.batch_mean(losses, weights=mask)

    In a step of your own given to `strategy.run`, gradients are summed over
    the ranks: there, too, the sum is the gradient of this mean. All ranks must
    call it; they exchange two numbers.

    Args:
        values: `[n, ...]` or a scalar of this rank, floating; the mean is over
            all elements.
        weights: of the shape of `values`, or of its first dimensions, or
            another that broadcasts to it; 1 by default.

    Returns:
        A scalar of the dtype of `values`, equal on all ranks; differentiable,
        also by `weights`.

    Raises:
        TypeError: for values that are not floating.
    """
    values = _floating("batch_mean", values)
    dtype = values.dtype
    values = _wide(values)
    if weights is None:
        weights = tf.ones_like(values)
    else:
        weights = _broadcast(weights, values)
    total, count = _totals(
        [tf.reduce_sum(weights * values), tf.reduce_sum(weights)]
    )
    return _of_batch(tf.cast(tf.math.divide_no_nan(total, count), dtype))


def batch_sum(values: Any) -> tf.Tensor:
    """The sum of values of all samples of the batch, on every rank.

    As `batch_mean`: equal on all ranks and to one process, the plain sum in
    one process and outside of a step.

    >>> float(batch_sum([1.0, 2.0, 6.0]))
    9.0

    Args:
        values: `[n, ...]` or a scalar of this rank, floating; the sum is over
            all elements.

    Returns:
        A scalar of the dtype of `values`, equal on all ranks; differentiable.

    Raises:
        TypeError: for values that are not floating.
    """
    values = _floating("batch_sum", values)
    (total,) = _totals([tf.reduce_sum(_wide(values))])
    return _of_batch(tf.cast(total, values.dtype))


def gather_batch(tensors: Nest) -> Nest:
    """The rows of the whole batch, in its order, on every rank.

    For a loss that does not decompose over the samples. What every rank
    computes from them is one process's loss; its gradient brings each rank
    the part of its own rows.

        rank 0 has [a b], rank 1 has [c]
        both get [a b c]

    >>> gather_batch({"x": tf.constant([1, 2])})["x"].numpy().tolist()
    [1, 2]

    Every rank computes the *same* loss of all samples:

        labels, scores = tfdist_ext.losses.gather_batch((labels, scores))
        loss = correlation_loss(labels, scores)

    With `gather_candidates` a rank computes the loss of its *own* samples, of
    which each is compared with those of all ranks: gradients are exchanged as
    well there, and here each rank does the work of all. Do not mix rows of
    both in one loss.

    All ranks must call it; they exchange all tensors at once. In one process
    and outside of a step it returns `tensors`.

    Args:
        tensors: nest of dense or ragged tensors `[n, ...]`, floating, integer,
            bool or string, all of the same n on a rank; n may differ between
            ranks and may be 0, the other dimensions may not.

    Returns:
        The same nest with `[sum of n, ...]`; floating ones differentiable.

    Raises:
        TypeError: for another dtype, and for sparse tensors.
        ValueError: for a scalar.
        tf.errors.InvalidArgumentError: on every rank, if rows have different
            shapes or dtypes on them.
    """
    collectives = _exchanging()
    flat = [_rows(each) for each in tf.nest.flatten(tensors)]
    if collectives is not None and flat:
        found = whole_rows.gather(collectives, flat, "losses/gather_batch")
        flat = [whole_rows.connected(each) for each in found]
        if whole_batch.keras_step() is not None:
            for rows in flat:
                marks.set_reduced(rows)
    return tf.nest.pack_sequence_as(tensors, flat)


def _exchanging() -> Collectives | None:
    """Who exchanges in the step that is under way, None where nobody does."""
    collectives = collectives_lib.active()
    step = collectives.step if collectives else None
    if step is None or step.checking or step.whole:
        return None
    if is_symbolic_build() or is_shape_inference():
        return None
    return collectives


def _floating(function: str, values: Any) -> tf.Tensor:
    if isinstance(values, tf.RaggedTensor):
        values = values.flat_values
    values = tf.convert_to_tensor(values)
    if not values.dtype.is_floating:
        raise TypeError(
            f"{function} takes floating values. Received: dtype "
            f"{values.dtype.name}. Cast them: tf.cast(values, tf.float32)."
        )
    return values


def _wide(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(values, tf.float32) if values.dtype in _NARROW else values


def _broadcast(weights: Any, values: tf.Tensor) -> tf.Tensor:
    """Weights of the shape of the values."""
    if isinstance(weights, tf.RaggedTensor):
        weights = weights.flat_values
    weights = tf.cast(weights, values.dtype)
    missing = (values.shape.rank or 0) - (weights.shape.rank or 0)
    if weights.shape.rank:
        weights = weights[(..., *[tf.newaxis] * missing)]
    return tf.broadcast_to(weights, tf.shape(values))


def _totals(parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums over the ranks; each rank's gradient is that of its own parts."""
    collectives = _exchanging()
    if collectives is None:
        return list(parts)
    exchange = collectives.all_reduce
    share = whole_batch.share() if whole_batch.keras_step() else None

    @tf.custom_gradient
    def total(*own: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if share is None:
                return list(upstream)
            # Ranks average their gradients by their shares.
            return [
                tf.math.divide_no_nan(each, tf.cast(share, each.dtype))
                for each in upstream
            ]

        return exchange(own, "losses/batch"), gradient

    return list(total(*parts))


def _of_batch(value: tf.Tensor) -> tf.Tensor:
    """Says in steps of Keras's loops that all ranks have the value."""
    if whole_batch.keras_step() is not None:
        marks.set_reduced(value)
    return value


def _rows(x: Any) -> Any:
    if isinstance(x, tf.SparseTensor):
        raise TypeError(
            "gather_batch takes dense and ragged tensors. Received: "
            "SparseTensor. Use tf.sparse.to_dense or tf.RaggedTensor."
            "from_sparse first."
        )
    x = x if isinstance(x, tf.RaggedTensor) else tf.convert_to_tensor(x)
    if not any_dtype.is_known(x.dtype):
        raise TypeError(
            "gather_batch takes floating, integer, bool and string tensors. "
            f"Received: dtype {x.dtype.name}."
        )
    if x.shape.rank == 0:
        raise ValueError(
            "gather_batch takes tensors whose first dimension counts samples. "
            "Received: a scalar. Its mean over the batch is batch_mean(x)."
        )
    return x
