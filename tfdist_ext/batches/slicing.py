# SPDX-License-Identifier: Apache-2.0
"""Slices of batches by sample, each in memory of its own.

TensorFlow takes an aligned NumPy array that a user's Python function returns
(`Dataset.from_generator`, a Keras generator, `tf.numpy_function`) as a tensor
without a copy, and knows that this memory is not its own. Of a slice of its
rows it does not know that: the next op may write its result there, into the
user's array or the file behind it. So every slice here is a copy.
"""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from tfdist_ext.ops import batch_ops

Nest = Any


def copied(value: tf.Tensor) -> tf.Tensor:
    """A tensor of rank 1 or more, in new memory."""
    # Not DeepCopy: it counts as stateful, and an iterator of a dataset with
    # such an op cannot be saved in a checkpoint.
    return tf.roll(value, shift=0, axis=0)


def in_own_memory(batch: Nest) -> Nest:
    """A batch whose tensors share no memory with a user's arrays."""
    flat = tf.nest.flatten(batch, expand_composites=True)
    return tf.nest.pack_sequence_as(
        batch,
        [part if _is_scalar(part) else copied(part) for part in flat],
        expand_composites=True,
    )


def _is_scalar(value: tf.Tensor) -> bool:
    return value.shape.rank == 0


def slice_of_rank(batch: Nest, rank: int, world_size: int) -> Nest:
    """Samples `[rank * n // W, (rank + 1) * n // W)` of a batch of n.

    Args:
        batch: of tensors, RaggedTensors, SparseTensors and `PrefetchedIds`;
            scalars are passed on whole.
        rank: whose samples.
        world_size: W.

    Returns:
        A nest like `batch`, in memory of its own.
    """
    flat = tf.nest.flatten(batch)
    kinds: dict[int, int] = {}
    for i, value in enumerate(flat):
        kind = _kind(value)
        if kind is not None:
            kinds[i] = kind
        elif hasattr(value, "nrows"):  # PrefetchedIds
            samples = value.nrows()
            start = rank * samples // world_size
            flat[i] = rows(value, start, (rank + 1) * samples // world_size)
    if kinds:
        parts = [_parts(flat[i]) for i in kinds]
        together = list(itertools.chain(*parts))
        cut = iter(
            batch_ops.slice_of_rank(
                together, list(kinds.values()), rank, world_size
            )
        )
        for i, those in zip(kinds, parts, strict=True):
            pieces = [next(cut) for _ in those]
            flat[i] = _like(flat[i], pieces, rank, world_size)
    return tf.nest.pack_sequence_as(batch, flat)


def _kind(value: Any) -> int | None:
    """What `batch_ops` calls it; None of what is no batch of tensors."""
    if isinstance(value, tf.SparseTensor):
        return batch_ops.SPARSE
    if isinstance(value, tf.RaggedTensor):
        return len(value.nested_row_splits)
    if isinstance(value, tf.Tensor) and not _is_scalar(value):
        return batch_ops.DENSE
    return None  # a scalar, PrefetchedIds, or an Optional: Keras's None


def _parts(value: Any) -> list[tf.Tensor]:
    if isinstance(value, tf.SparseTensor):
        return [value.indices, value.values, value.dense_shape]
    if isinstance(value, tf.RaggedTensor):
        return [value.flat_values, *value.nested_row_splits]
    return [value]


def _like(
    value: Any, parts: list[tf.Tensor], rank: int, world_size: int
) -> Any:
    """Samples of a rank as the same kind of value that they were in."""
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensor.from_nested_row_splits(
            parts[0], parts[1:], validate=False
        )
    if not isinstance(value, tf.SparseTensor):
        return parts[0]
    piece = tf.SparseTensor(*parts)
    if value.shape.rank is None:
        return piece
    size = value.shape[0]
    if size is not None:
        size = _size(size, rank, world_size) or None
    return _with_static_shape(piece, [size, *value.shape[1:]])


def rows(value: Any, start: tf.Tensor, stop: tf.Tensor) -> Any:
    """Rows `[start, stop)` of a value, in memory of their own.

    Args:
        value: Tensor, RaggedTensor or `PrefetchedIds`.
        start: integer scalar.
        stop: integer scalar.
    """
    if isinstance(value, tf.RaggedTensor):
        # As TensorFlow slices it, but for the copy: it subtracts in place.
        splits = copied(value.row_splits[start : stop + 1])
        return tf.RaggedTensor.from_row_splits(
            rows(value.values, splits[0], splits[-1]),
            splits - splits[0],
            validate=False,
        )
    piece = value[start:stop]
    return copied(piece) if isinstance(piece, tf.Tensor) else piece


def _size(samples: int, rank: int, world_size: int) -> int:
    return (rank + 1) * samples // world_size - rank * samples // world_size


def _with_static_shape(
    value: tf.SparseTensor, shape: list[int | None]
) -> tf.SparseTensor:
    # The static shape of a SparseTensor is read off its dense_shape.
    parts = [
        value.dense_shape[i] if size is None else tf.constant(size, tf.int64)
        for i, size in enumerate(shape)
    ]
    return tf.SparseTensor(value.indices, value.values, tf.stack(parts))
