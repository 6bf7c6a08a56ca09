# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients in which a row occurs more than once."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.ops import optimizer_ops


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
