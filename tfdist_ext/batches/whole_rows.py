# SPDX-License-Identifier: Apache-2.0
"""The rows of the whole batch on every rank.

What is computed from them is equal on all ranks, and is what one process
computes. Its gradient gives each rank the slice that belongs to its own rows,
without an exchange.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.batches import whole_batch
from tfdist_ext.collectives import any_dtype
from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.collectives.agreeing import agree
from tfdist_ext.collectives.collectives import Collectives

Rows = Any  # tf.Tensor or tf.RaggedTensor


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The rows of all ranks, in the order of the batch.

    Attributes:
        own: this rank's rows, of which they are gathered.
        rows: those of all ranks.
        sizes: int64 `[world_size]`, how many each rank has.
        rank: of this process.
    """

    own: Rows
    rows: Rows
    sizes: tf.Tensor
    rank: int

    def first(self) -> tf.Tensor:
        """int64 scalar, which row is the first of this rank."""
        return tf.reduce_sum(self.sizes[: self.rank])

    def share(self) -> tf.Tensor:
        """This rank's part of the rows, float32 in [0, 1]."""
        sizes = tf.cast(self.sizes, tf.float32)
        return tf.math.divide_no_nan(sizes[self.rank], tf.reduce_sum(sizes))


def gather(
    collectives: Collectives, tensors: Sequence[Rows], label: str
) -> list[Gathered]:
    """Gathers rows of several tensors, if possible in one exchange.

    Args:
        collectives: of the strategy; all ranks must call.
        tensors: dense `[n, ...]` with the same n, or ragged, of any dtype
            that `any_dtype.is_known`; n may differ between the ranks.
        label: names the exchange in errors and statistics.

    Returns:
        What is gathered of each, in order.
    """
    agree(collectives, [f"{label} of {_kinds(tensors)}"])
    packed = [i for i, x in enumerate(tensors) if _is_packed(x)]
    found: dict[int, tuple[Rows, tf.Tensor]] = {}
    if packed:
        rows, sizes = _gather_packed(
            collectives, [tensors[i] for i in packed], label
        )
        found = {i: (each, sizes) for i, each in zip(packed, rows, strict=True)}
    for i, x in enumerate(tensors):
        if i not in found:
            found[i] = any_dtype.all_gather_rows(collectives, x, label)
    rank = collectives.group.rank
    return [Gathered(x, *found[i], rank) for i, x in enumerate(tensors)]


def _kinds(tensors: Sequence[Rows]) -> str:
    return ", ".join(
        f"{x.dtype.name} [n{''.join(f', {d}' for d in x.shape[1:])}]"
        for x in tensors
    )


def _is_packed(x: Rows) -> bool:
    return isinstance(x, tf.Tensor) and x.dtype != tf.string


def _gather_packed(
    collectives: Collectives, tensors: Sequence[tf.Tensor], label: str
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Gathers dense tensors side by side, as the bytes of their rows."""
    if len(tensors) == 1:
        rows, sizes = any_dtype.all_gather(collectives, tensors[0], label)
        return [rows], sizes
    parts = [_bytes_of(x) for x in tensors]
    packed, sizes = collectives.all_gather_parts(tf.concat(parts, 1), label)
    lengths = [_row_bytes(x) for x in tensors]
    parts = tf.split(packed, tf.stack(lengths), axis=1, num=len(tensors))
    rows = [
        _from_bytes(part, x) for part, x in zip(parts, tensors, strict=True)
    ]
    return rows, sizes


def _row_elements(x: tf.Tensor) -> int | tf.Tensor:
    """How many elements a row has, static where it is known."""
    if x.shape.rank is not None and None not in x.shape[1:]:
        return functools.reduce(operator.mul, x.shape[1:], 1)
    return tf.reduce_prod(tf.shape(x)[1:])


def _row_bytes(x: tf.Tensor) -> int | tf.Tensor:
    return _row_elements(x) * x.dtype.size


def _bytes_of(x: tf.Tensor) -> tf.Tensor:
    """uint8 `[n, bytes of a row]`."""
    narrow = x.dtype == tf.bool or x.dtype.size == 1
    codes = tf.cast(x, tf.uint8) if narrow else tf.bitcast(x, tf.uint8)
    return tf.reshape(codes, [tf.shape(x)[0], _row_bytes(x)])


def _from_bytes(codes: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """The rows whose bytes `_bytes_of` has given."""
    shape = tf.concat([tf.shape(codes)[:1], tf.shape(like)[1:]], 0)
    if like.dtype == tf.bool or like.dtype.size == 1:
        rows = tf.cast(tf.reshape(codes, shape), like.dtype)
    else:
        shape = tf.concat([shape, [like.dtype.size]], 0)
        rows = tf.bitcast(tf.reshape(codes, shape), like.dtype)
    rows.set_shape([None, *like.shape[1:]])
    return rows


def static_row_bytes(x: Rows) -> int:
    """Bytes of a row, 0 where that is not known before a step runs."""
    if not _is_packed(x) or None in x.shape[1:]:
        return 0
    return int(_row_bytes(x))


def connected(found: Gathered, exchanged: bool = False) -> Rows:
    """The gathered rows; their gradient is that of this rank's own rows.

    Each use of rows that are gathered once is connected for itself, so that
    every tape that records sees it.

    Args:
        found: floating rows, or others, which have no gradient.
        exchanged: whether the ranks compute different things from the rows.
            Their gradients are summed then, which is an exchange; otherwise
            they are equal.
    """
    own, rows = found.own, found.rows
    if not own.dtype.is_floating:
        return rows
    if not isinstance(rows, tf.RaggedTensor):
        return _connected(own, rows, found.first(), exchanged)
    first = tf.cast(found.first(), rows.row_splits.dtype)
    for splits in rows.nested_row_splits:
        first = splits[first]
    values = _connected(own.flat_values, rows.flat_values, first, exchanged)
    return rows.with_flat_values(values)


def _connected(
    own: tf.Tensor, rows: tf.Tensor, first: tf.Tensor, exchanged: bool
) -> tf.Tensor:
    # Ranks average their gradients by their shares in Keras's loops, and sum
    # them elsewhere.
    share = whole_batch.share() if whole_batch.keras_step() else None
    start = tf.cast(first, tf.int64)

    @tf.custom_gradient
    def whole(own: tf.Tensor, rows: tf.Tensor) -> Any:
        def gradient(upstream: Any) -> tuple[tf.Tensor, None]:
            upstream = tf.convert_to_tensor(upstream)
            if exchanged:
                upstream = _sum_of_all(upstream, share)
            part = upstream[start : start + tf.shape(own, tf.int64)[0]]
            part = tf.ensure_shape(part, own.shape)
            if share is not None:
                part = tf.math.divide_no_nan(part, tf.cast(share, part.dtype))
            return part, None

        return tf.identity(rows), gradient

    return whole(own, tf.stop_gradient(rows))


def _sum_of_all(upstream: tf.Tensor, share: tf.Tensor | None) -> tf.Tensor:
    """What the rows are to the ranks together."""
    collectives = collectives_lib.active()
    assert collectives is not None
    if share is not None:
        # Of a rank without samples, no number counts.
        share = tf.cast(share, upstream.dtype)
        upstream = tf.math.multiply_no_nan(upstream, share)
    return collectives.all_reduce([upstream], "losses/gradients")[0]
