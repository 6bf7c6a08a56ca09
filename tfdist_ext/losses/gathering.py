# SPDX-License-Identifier: Apache-2.0
"""Rows of all ranks in the loss of each, and their gradient."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.batches import whole_batch
from tfdist_ext.collectives import any_dtype
from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.collectives.agreeing import agree
from tfdist_ext.keras_internals import is_shape_inference
from tfdist_ext.keras_internals import is_symbolic_build


def gather_candidates(x: Any) -> tf.Tensor:
    """The rows of all ranks, this rank's own first, for losses over a batch.

    Row i of `x` is row i of the result, so that a loss whose labels are
    `tf.eye(queries, candidates)` stays as it is, and means the whole batch:

        rank 0 has [a b], rank 1 has [c]
        rank 0 gets [a b c], rank 1 gets [c a b]

    The gradient brings every row what it is to the losses of all ranks. In a
    `fit` that is one process's, for means and sums over the samples; in a
    step of your own given to `strategy.run` it is the sum over the ranks.

    All ranks must call it, as they do in a step. Outside of one, without a
    strategy and in one process it returns `x`.

    Args:
        x: `[n, ...]`, floating, integer, bool or string. n may differ between
            the ranks and may be 0, the other dimensions may not.

    Returns:
        `[sum of n, ...]`, of the dtype of `x`; differentiable if floating.

    Raises:
        TypeError: for another dtype, and for ragged and sparse tensors.
        ValueError: for a scalar.
        tf.errors.InvalidArgumentError: on every rank, if rows have different
            shapes or dtypes on them.
    """
    rows, first = in_order(x)
    if first is None:
        return rows
    step = whole_batch.keras_step()
    if step is not None:
        whole_batch.dependence_in(step).own_rows_first = True
    own_first = tf.roll(rows, -first, axis=0)
    own_first.set_shape(rows.shape)
    return own_first


def in_order(x: Any) -> tuple[tf.Tensor, tf.Tensor | None]:
    """The rows of all ranks as they are in the batch, see above.

    Args:
        x: as for `gather_candidates`.

    Returns:
        The rows in the order of the ranks, and int32, which of them is the
        first of this rank; None where nothing is gathered.
    """
    x = _checked(x)
    collectives = collectives_lib.active()
    step = collectives.step if collectives else None
    if collectives is None or step is None:
        return x, None
    if step.whole or step.checking:  # every rank has the rows of all
        return x, None
    if is_symbolic_build() or is_shape_inference():
        return x, None
    kind = f"{x.dtype.name} [n{''.join(f', {d}' for d in x.shape[1:])}]"
    agree(collectives, [f"gather_candidates of {kind}"])
    if x.dtype.is_floating:
        x = _gradient_of_all(x)
    rows, sizes = any_dtype.all_gather(collectives, x, "gather_candidates")
    first = tf.reduce_sum(sizes[: collectives.group.rank])
    if x.dtype.is_floating:
        rows = _gradient_by_samples(rows)
    return rows, tf.cast(first, tf.int32)


def _checked(x: Any) -> tf.Tensor:
    if isinstance(x, tf.RaggedTensor | tf.SparseTensor):
        raise TypeError(
            "gather_candidates takes dense tensors, one row for each "
            f"candidate. Received: {type(x).__name__}. Pool or pad its rows "
            "first, or gather its parts."
        )
    x = tf.convert_to_tensor(x)
    if not any_dtype.is_known(x.dtype):
        raise TypeError(
            "gather_candidates takes floating, integer, bool and string "
            f"tensors. Received: dtype {x.dtype.name}."
        )
    if x.shape.rank == 0:
        raise ValueError(
            "gather_candidates takes tensors whose first dimension counts "
            "candidates. Received: a scalar."
        )
    return x


# Ranks weigh their gradients by their samples, after this: what a rank's loss
# gives to rows of others has to be weighed by its own samples, not theirs.


@tf.custom_gradient
def _gradient_by_samples(rows: tf.Tensor) -> Any:
    """The same; weighs the gradient by this rank's part of the batch."""

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        if whole_batch.keras_step() is None:
            return upstream
        share = tf.cast(whole_batch.share(), upstream.dtype)
        # Of a rank without samples, no number counts.
        return tf.math.multiply_no_nan(upstream, share)

    return tf.identity(rows), gradient


@tf.custom_gradient
def _gradient_of_all(x: tf.Tensor) -> Any:
    """The same; its gradient is of the whole batch, to be weighed again."""

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        if whole_batch.keras_step() is None:
            return upstream
        share = tf.cast(whole_batch.share(), upstream.dtype)
        return tf.math.divide_no_nan(upstream, share)

    return tf.identity(x), gradient
