# SPDX-License-Identifier: Apache-2.0
"""Slices of batches by sample, each in memory of its own.

TensorFlow takes an aligned NumPy array that a user's Python function returns
(`Dataset.from_generator`, a Keras generator, `tf.numpy_function`) as a tensor
without a copy, and knows that this memory is not its own. Of a slice of its
rows it does not know that: the next op may write its result there, into the
user's array or the file behind it. So every slice here is a copy.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

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

    # Few ops: every `fit` traces this anew, for each part of the batch.
    numbers = tf.constant([rank, rank + 1], tf.int64)
    zero, one = tf.constant([0], tf.int64), tf.constant([1], tf.int64)

    def cut(value: Any) -> Any:
        if isinstance(value, tf.experimental.Optional):  # Keras's None
            return value
        if isinstance(value, tf.SparseTensor):
            return _cut_sparse(value, rank, world_size)
        if hasattr(value, "nrows"):  # RaggedTensor, PrefetchedIds
            samples = value.nrows()
            return rows(
                value,
                rank * samples // world_size,
                (rank + 1) * samples // world_size,
            )
        if _is_scalar(value):
            return value
        samples = tf.slice(tf.shape(value, tf.int64), zero, one)
        start, stop = tf.split(numbers * samples // world_size, 2)
        piece = copied(
            tf.raw_ops.StridedSlice(
                input=value, begin=start, end=stop, strides=one
            )
        )
        size = value.shape[0]
        if size is None:
            return piece
        return _with_size(piece, _size(size, rank, world_size))

    return tf.nest.map_structure(cut, batch)


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


def _with_size(value: tf.Tensor, size: int) -> tf.Tensor:
    """Samples of a number that is known, unless there are none.

    Keras leaves the losses of a batch that is known to be empty as they are,
    and ranks with samples would exchange what those without do not.
    """
    if size > 0:
        value.set_shape([size, *value.shape[1:]])
        return value
    return tf.raw_ops.PlaceholderWithDefault(
        input=value, shape=[None, *value.shape[1:]]
    )


def _cut_sparse(
    value: tf.SparseTensor, rank: int, world_size: int
) -> tf.SparseTensor:
    samples = value.dense_shape[0]
    first = rank * samples // world_size
    count = (rank + 1) * samples // world_size - first
    rest = value.dense_shape[1:]
    piece = tf.sparse.slice(
        value,
        tf.concat([[first], tf.zeros_like(rest)], 0),
        tf.concat([[count], rest], 0),
    )
    if value.shape.rank is None:
        return piece
    size = value.shape[0]
    if size is not None:
        size = _size(size, rank, world_size) or None
    return _with_static_shape(piece, [size, *value.shape[1:]])


def _with_static_shape(
    value: tf.SparseTensor, shape: list[int | None]
) -> tf.SparseTensor:
    # The static shape of a SparseTensor is read off its dense_shape.
    parts = [
        value.dense_shape[i] if size is None else tf.constant(size, tf.int64)
        for i, size in enumerate(shape)
    ]
    return tf.SparseTensor(value.indices, value.values, tf.stack(parts))
