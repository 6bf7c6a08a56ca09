# SPDX-License-Identifier: Apache-2.0
"""The functions of `lookup_ops.py`, made of stock TensorFlow ops.

The oracle in the tests: same signatures, slow and plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.keras_internals import value_of
from tfdist_ext.tables.placement import FeaturePlacement


def lookup(
    tables: Sequence[Any],
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
    served: tf.Tensor,
    *,
    feature_tables: Sequence[int],
) -> tuple[tf.Tensor, tf.Tensor]:
    """See `lookup_ops.lookup`; the gradients' rows may repeat."""
    values = [tf.zeros([0])]
    for f, splits, *entries in _blocks(row_splits, rows, weights, served):
        if tf.size(splits) > 1:
            table = tables[feature_tables[f]]
            matrix = value_of(table)
            values.append(tf.reshape(_sum(matrix, splits, *entries), [-1]))
    widths = [tables[t].shape[1] if t >= 0 else 0 for t in feature_tables]
    send_splits = tf.reduce_sum(served * tf.constant(widths, tf.int64), 1)
    return tf.concat(values, 0), send_splits


def _blocks(
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
    served: tf.Tensor,
) -> Iterator[tuple[int, tf.Tensor, tf.Tensor, tf.Tensor]]:
    """Feature, row_splits, rows and weights of every rank and feature."""
    row_splits = tf.convert_to_tensor(row_splits, tf.int64)
    ranks, features = tf.convert_to_tensor(served).shape
    first = 0
    for i in range(ranks * features):
        end = first + int(served[i // features][i % features])
        splits = row_splits[first : end + 1]
        entries = slice(splits[0], splits[-1])
        weight = weights[entries] if tf.size(weights) > 0 else weights
        yield i % features, splits - splits[0], rows[entries], weight
        first = end


def _sum(
    table: Any, row_splits: tf.Tensor, rows: tf.Tensor, weights: tf.Tensor
) -> tf.Tensor:
    gathered = tf.cast(tf.gather(table, rows), tf.float32)
    if tf.size(weights) > 0:
        gathered = gathered * weights[:, None]
    return tf.math.unsorted_segment_sum(
        gathered, _segments(row_splits), tf.size(row_splits) - 1
    )


def _segments(row_splits: tf.Tensor) -> tf.Tensor:
    samples = tf.range(tf.size(row_splits) - 1)
    return tf.repeat(samples, row_splits[1:] - row_splits[:-1])


def lookup_grad(
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
    served: tf.Tensor,
    grad: tf.Tensor,
    *,
    feature_tables: Sequence[int],
    table_shapes: Sequence[Sequence[int]],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """See `lookup_ops.lookup_grad`."""
    widths = [width for _, width in table_shapes]
    all_rows = [[tf.zeros([0], tf.int64)] for _ in widths]
    all_grads = [[tf.zeros([0, width])] for width in widths]
    for f, splits, block_rows, weight in _blocks(
        row_splits, rows, weights, served
    ):
        if tf.size(splits) == 1:
            continue
        table = feature_tables[f]
        size = (tf.size(splits) - 1) * widths[table]
        block, grad = grad[:size], grad[size:]
        per_sample = tf.reshape(block, [-1, widths[table]])
        per_id = tf.gather(per_sample, _segments(splits))
        if tf.size(weight) > 0:
            per_id = per_id * weight[:, None]
        all_rows[table].append(block_rows)
        all_grads[table].append(per_id)
    unique_rows, row_grads = [], []
    for each_rows, each_grads in zip(all_rows, all_grads, strict=True):
        table_rows = tf.concat(each_rows, 0)
        order = tf.argsort(table_rows, stable=True)
        unique, index = tf.unique(tf.gather(table_rows, order))
        unique_rows.append(unique)
        row_grads.append(
            tf.math.unsorted_segment_sum(
                tf.gather(tf.concat(each_grads, 0), order),
                index,
                tf.size(unique),
            )
        )
    return unique_rows, row_grads


def join_parts(
    parts: tf.Tensor,
    sample_ids: tf.Tensor,
    sample_splits: tf.Tensor,
    samples: tf.Tensor,
    gradient_scale: tf.Tensor,
    *,
    placements: Sequence[FeaturePlacement],
    world_size: int,
) -> list[tf.Tensor]:
    """See `lookup_ops.join_parts`."""
    cells: dict[tuple[int, int], tf.Tensor] = {}
    for rank in range(world_size):
        for f, p in enumerate(placements):
            if rank not in p.ranks:
                continue
            part = p.ranks.index(rank) % p.column_parts
            ends = [i * p.dim // p.column_parts for i in (part, part + 1)]
            count, width = int(sample_splits[rank][f]), ends[1] - ends[0]
            block = tf.reshape(parts[: count * width], [count, width])
            cell = tf.math.unsorted_segment_sum(
                block, sample_ids[:count], int(samples[f])
            )
            cells[f, part] = cells.get((f, part), 0.0) + cell
            parts, sample_ids = parts[count * width :], sample_ids[count:]
    return [
        _scale_gradient(
            tf.concat([cells[f, j] for j in range(p.column_parts)], 1),
            gradient_scale,
        )
        for f, p in enumerate(placements)
    ]


@tf.custom_gradient
def _scale_gradient(x: tf.Tensor, scale: tf.Tensor) -> Any:
    def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        return tf.math.multiply_no_nan(upstream, scale), None

    return tf.identity(x), grad


def pool(
    matrix: tf.Tensor,
    row_splits: tf.Tensor,
    positions: tf.Tensor,
    weights: tf.Tensor,
) -> tf.Tensor:
    """See `lookup_ops.pool`."""
    row_splits = tf.convert_to_tensor(row_splits, tf.int64)
    return _sum(matrix, row_splits, positions, weights)
