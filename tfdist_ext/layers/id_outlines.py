# SPDX-License-Identifier: Apache-2.0
"""How ids lie, which the results of their lookup are laid out by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.batches import outline
from tfdist_ext.batches.outline import Outline

Sizes = Sequence[int | None]


def outline_of(ids: Any, kept: bool, layer: str, length: Sizes = ()) -> Outline:
    """The outline of the results of a feature.

    Args:
        ids: a tensor, a RaggedTensor or a SparseTensor, as the lists of
            `sparse_inputs` are made of.
        kept: whether the row of every id is kept; otherwise the last
            dimension of the ids is gone.
        layer: name, for errors.
        length: what ragged dimensions are filled to; nothing known leaves
            them ragged.
    """
    if isinstance(ids, tf.RaggedTensor):
        return _of_ragged(ids, kept, layer, length)
    if isinstance(ids, tf.SparseTensor):
        shape, static = ids.dense_shape, ids.shape
    else:
        ids = tf.convert_to_tensor(ids)
        shape, static = tf.shape(ids, tf.int64), ids.shape
        kept = kept or static.rank == 1
    if static.rank == (1 if kept else 2):  # a result for each sample
        return Outline(shape[0], tf.zeros([0], tf.int64), ())
    if not kept:
        shape, static = shape[:-1], static[:-1]
    return outline.dense(shape, static)


def _of_ragged(
    ids: tf.RaggedTensor, kept: bool, layer: str, length: Sizes
) -> Outline:
    splits = [tf.cast(each, tf.int64) for each in ids.nested_row_splits]
    flat = ids.flat_values
    if kept or flat.shape.rank > 1:
        within = outline_of(flat, kept, layer)
    else:
        count = tf.size(splits.pop(), tf.int64) - 1
        within = Outline(count, tf.zeros([0], tf.int64), ())
    pad: list[int] = []
    if splits and any(size is not None for size in length):
        pad = [-1 if size is None else size for size in length]
    return Outline(
        within.count, within.inner, within.sizes, tuple(splits), tuple(pad)
    )


def of_length(ids: Any, length: Sizes, layer: str) -> Any:
    """The ids of sequences: cut after a length; of a tensor it is checked.

    Args:
        ids: `[batch, ...]`, or weights of ids.
        length: sizes of the dimensions after the batch, None if any will do.
        layer: name, for errors.

    Raises:
        ValueError: for a tensor of another length.
    """
    if all(size is None for size in length):
        return ids
    if isinstance(ids, tf.RaggedTensor):
        return ids[(slice(None), *(slice(size) for size in length))]
    if isinstance(ids, tf.SparseTensor):
        return _sparse_of_length(ids, length)
    ids = tf.convert_to_tensor(ids)
    if not ids.shape[1:].is_compatible_with(length):
        raise ValueError(
            f"Layer '{layer}' takes ids (batch, {', '.join(map(str, length))})"
            f", as its `output_shape` tells. Received: shape {ids.shape}."
        )
    return tf.ensure_shape(ids, [None, *length])


def _sparse_of_length(ids: tf.SparseTensor, length: Sizes) -> tf.SparseTensor:
    sizes = tf.constant([-1, *(-1 if n is None else n for n in length)])
    sizes = tf.cast(sizes, tf.int64)
    shape = tf.where(sizes < 0, ids.dense_shape, sizes)
    cut = tf.sparse.slice(ids, tf.zeros_like(shape), shape)
    return tf.SparseTensor(
        cut.indices, cut.values, tf.ensure_shape(shape, [len(length) + 1])
    )
