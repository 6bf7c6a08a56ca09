# SPDX-License-Identifier: Apache-2.0
"""Lookup of lists of equal lengths with gathers and sums over an axis."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.embedding import pooled_lookup
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids


def look_up(
    lists: Sequence[Ids], feature: Feature, rows_of: pooled_lookup.RowsOf
) -> tf.Tensor:
    """Looks up and combines rows as `pooled_lookup.look_up` does.

    Lists whose lengths are known, as of ids in dense tensors, need no ops of
    segments, which other formats of models express by loops or not at all.
    The rows of a sample may be summed in another order.

    Args:
        lists: the ids whose results are summed.
        feature: the feature, with its combiner and `out_of_range`.
        rows_of: a function that reads rows float32 `[..., dim]` of ids int64
            `[...]`.

    Returns:
        The combined rows, float32 `[b, dim]`.
    """
    lengths = [marks.list_length(part.row_splits) for part in lists]
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return pooled_lookup.look_up(lists, feature, rows_of)
    ids = _joined([tf.cast(part.values, tf.int64) for part in lists], known)
    weights = None
    if any(_has_weights(part) for part in lists):
        weights = _joined(list(map(_weights, lists)), known)
    if feature.out_of_range == "error":
        return _combined(rows_of(ids), weights, sum(known), feature)
    inside = (ids >= 0) & (ids < feature.spec.rows)
    rows = rows_of(tf.where(inside, ids, 0))
    rows = tf.where(inside[..., tf.newaxis], rows, 0.0)
    kept = tf.cast(inside, tf.float32)
    weights = kept if weights is None else weights * kept
    return _combined(rows, weights, sum(known), feature)


def _joined(parts: Sequence[tf.Tensor], lengths: Sequence[int]) -> tf.Tensor:
    """The values `[b, k]` of all lists of a sample, from flat ones."""
    rows = [
        tf.reshape(part, [-1, length])
        for part, length in zip(parts, lengths, strict=True)
    ]
    return rows[0] if len(rows) == 1 else tf.concat(rows, 1)


def _has_weights(part: Ids) -> bool:
    return part.weights.shape.num_elements() != 0


def _weights(part: Ids) -> tf.Tensor:
    if _has_weights(part):
        return part.weights
    return tf.ones_like(part.values, tf.float32)


def _combined(
    rows: tf.Tensor, weights: tf.Tensor | None, count: int, feature: Feature
) -> tf.Tensor:
    """Combines rows float32 `[b, k, dim]` with weights `[b, k]`."""
    if weights is not None:
        rows *= weights[..., tf.newaxis]
    sums = tf.squeeze(rows, 1) if count == 1 else tf.reduce_sum(rows, 1)
    if feature.combiner == "sum":
        return sums
    squared = feature.combiner == "sqrtn"
    if weights is None:
        return sums / (count**0.5 if squared else count)
    weights = tf.square(weights) if squared else weights
    totals = tf.reduce_sum(weights, 1, keepdims=True)
    return tf.math.divide_no_nan(sums, tf.sqrt(totals) if squared else totals)
