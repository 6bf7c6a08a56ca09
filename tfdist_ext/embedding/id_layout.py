# SPDX-License-Identifier: Apache-2.0
"""How the results of a lookup lie: as samples, or as sequences of them.

A lookup gives one row after the other, one for each list of ids. What the ids
of a feature look like says where these belong.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Layout(tf.experimental.BatchableExtensionType):
    """The dimensions of a feature's results before the last one.

    Attributes:
        count: int64 scalar, size of the dimension before `inner`: the batch,
            or what is in the ragged ones.
        inner: int64 `[m]`, sizes of the dimensions that follow it.
        sizes: these as far as they are known, -1 for others.
        splits: row splits of ragged dimensions, the outermost first.
        pad: sizes that ragged dimensions are filled to, -1 for the longest;
            none at all where they stay ragged.
    """

    count: tf.Tensor
    inner: tf.Tensor
    sizes: typing.Tuple[int, ...]  # noqa: UP006 (ExtensionType)
    splits: typing.Tuple[tf.Tensor, ...] = ()  # noqa: UP006
    pad: typing.Tuple[int, ...] = ()  # noqa: UP006

    @property
    def lists_per_sample(self) -> tf.Tensor:
        """int64 scalar; of what is in ragged dimensions, if there are any."""
        return tf.reduce_prod(self.inner)


def dense(shape: tf.Tensor, static: tf.TensorShape) -> Layout:
    """The layout of results `[*shape, dim]`.

    Args:
        shape: int64 `[1 + m]`.
        static: the same as far as it is known.
    """
    sizes = tuple(-1 if size is None else size for size in static[1:])
    return Layout(shape[0], shape[1:], sizes)


def arranged(rows: tf.Tensor, layout: Layout) -> Any:
    """Results where they belong.

    Args:
        rows: `[n, ...]`, a result for each list.
        layout: of the ids.

    Returns:
        A tensor or a RaggedTensor `[..., *rows.shape[1:]]`.
    """
    last = rows.shape[1:]
    if layout.sizes:
        shape = [layout.count[tf.newaxis], layout.inner]
        rows = tf.reshape(rows, tf.concat([*shape, last], 0))
        known = [None if size < 0 else size for size in layout.sizes]
        rows.set_shape([None, *known, *last])
    if not layout.splits:
        return rows
    ragged = tf.RaggedTensor.from_nested_row_splits(
        rows, layout.splits, validate=False
    )
    if not layout.pad:
        return ragged
    shape = [None if size < 0 else size for size in layout.pad]
    return ragged.to_tensor(shape=[None, *shape, *last])


def zeros(layout: Layout, dim: int) -> Any:
    """Results of zeros, without a lookup."""
    lists = layout.count * tf.reduce_prod(layout.inner)
    return arranged(tf.zeros([lists, dim]), layout)


def cut(layout: Layout, start: Any, stop: Any) -> Layout:
    """The layout of some samples in a row."""
    splits = []
    for each in layout.splits:
        part = each[start : stop + 1]
        start, stop = part[0], part[-1]
        splits.append(part - start)
    count = tf.cast(stop - start, tf.int64)
    inner, sizes = layout.inner, layout.sizes
    return Layout(count, inner, sizes, tuple(splits), layout.pad)


def lists_before(layout: Layout, sample: Any) -> tf.Tensor:
    """int64 scalar, the number of the first list of a sample."""
    for splits in layout.splits:
        sample = splits[sample]
    return tf.cast(sample, tf.int64) * layout.lists_per_sample


def empty(like: Any) -> Layout:
    """That of a batch of zero samples.

    Args:
        like: a layout, or what a dataset says of one.
    """
    inner = tf.constant([max(size, 0) for size in like.sizes], tf.int64)
    splits = tuple(tf.zeros([1], tf.int64) for _ in like.splits)
    return Layout(tf.zeros([], tf.int64), inner, like.sizes, splits, like.pad)


def static_shape(layout: Any) -> Sequence[int | None]:
    """The shape of results but their last dimension, as far as known."""
    ragged = [None] * len(layout.splits)
    return [None, *ragged, *(None if s < 0 else s for s in layout.sizes)]
