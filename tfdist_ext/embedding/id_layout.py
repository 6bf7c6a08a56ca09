# SPDX-License-Identifier: Apache-2.0
"""Layouts: the dimensions that results of a lookup are put into.

A lookup returns one row for each list of ids, concatenated. The shape of the
ids determines the dimensions of the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.type_names import TensorLike


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dimensions of a feature's results, except the last one.

    Attributes:
        count: int64 scalar, the size of the dimension before `inner`: the
            batch size, or the number of elements of ragged dimensions.
        inner: int64 `[m]`, the sizes of the dimensions after it.
        sizes: the static sizes in `inner`; -1 where not known.
        splits: row splits of ragged dimensions, the outermost first.
        pad: sizes to which ragged dimensions are padded; -1 for the longest.
            Empty if the results are ragged.
    """

    count: tf.Tensor
    inner: tf.Tensor
    sizes: tuple[int, ...]
    splits: tuple[tf.Tensor, ...] = ()
    pad: tuple[int, ...] = ()

    @property
    def lists_per_sample(self) -> tf.Tensor:
        """int64 scalar, lists per sample, or per element of ragged ones."""
        return tf.reduce_prod(self.inner)


def dense(shape: tf.Tensor, static: tf.TensorShape) -> Layout:
    """Returns the layout of results `[*shape, dim]`.

    Args:
        shape: int64 `[1 + m]`.
        static: the static shape, as far as it is known.
    """
    sizes = tuple(-1 if size is None else size for size in static[1:])
    return Layout(shape[0], shape[1:], sizes)


def arranged(rows: tf.Tensor, layout: Layout) -> TensorLike:
    """Puts the results into the dimensions of a layout.

    Args:
        rows: `[n, ...]`, one result for each list.
        layout: the layout of the results.

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


def zeros(layout: Layout, dim: int) -> TensorLike:
    """Returns zeros as results, without a lookup."""
    lists = layout.count * tf.reduce_prod(layout.inner)
    return arranged(tf.zeros([lists, dim]), layout)


def cut(
    layout: Layout, start: int | tf.Tensor, stop: int | tf.Tensor
) -> Layout:
    """Returns the layout of the samples from `start` to `stop`."""
    splits = []
    for each in layout.splits:
        part = each[start : stop + 1]
        start, stop = part[0], part[-1]
        splits.append(part - start)
    count = tf.cast(stop - start, tf.int64)
    inner, sizes = layout.inner, layout.sizes
    return Layout(count, inner, sizes, tuple(splits), layout.pad)


def lists_before(layout: Layout, sample: int | tf.Tensor) -> tf.Tensor:
    """Returns the index of a sample's first list, an int64 scalar."""
    for splits in layout.splits:
        sample = splits[sample]
    return tf.cast(sample, tf.int64) * layout.lists_per_sample


def empty(like: Layout) -> Layout:
    """Returns the layout of an empty batch.

    Args:
        like: a layout, or its spec in a dataset.
    """
    inner = tf.constant([max(size, 0) for size in like.sizes], tf.int64)
    splits = tuple(tf.zeros([1], tf.int64) for _ in like.splits)
    return Layout(tf.zeros([], tf.int64), inner, like.sizes, splits, like.pad)


def static_shape(layout: Layout) -> Sequence[int | None]:
    """Returns the static shape of results, except the last dimension."""
    ragged = [None] * len(layout.splits)
    return [None, *ragged, *(None if s < 0 else s for s in layout.sizes)]
