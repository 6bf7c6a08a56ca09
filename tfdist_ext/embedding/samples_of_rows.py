# SPDX-License-Identifier: Apache-2.0
"""How many samples have each row that is looked up, for its owner."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding.exchange import Pooling
from tfdist_ext.embedding.exchange import Route
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.ops import row_counts


def samples_of_lists(
    route: Route,
    poolings: Sequence[Pooling],
    features: Sequence[Feature],
    collectives: Collectives,
    label: str,
) -> tf.Tensor:
    """Sends the owners the number of samples that each of their lists is for.

    Args:
        route: the return route of the lists.
        poolings: one for each feature with unique rows, in order.
        features: the features that were looked up.
        collectives: the strategy's collectives.
        label: the name of the exchange in errors.

    Returns:
        float32 `[S]`, in the order of `OwnedIds`: of a feature with unique
        rows the number of samples that have the row, otherwise 1.
    """
    of_unique = iter(poolings)
    counts = [
        _samples_of_rows(next(of_unique), route.samples[index])
        if feature.unique
        else tf.ones(route.samples[index : index + 1])
        for index, feature in enumerate(features)
    ]
    starts = tf.cumsum(route.samples, exclusive=True)
    ranks = tf.shape(route.sample_splits)[:1]
    starts = tf.repeat(
        tf.tile(starts, ranks), tf.reshape(route.sample_splits, [-1])
    )
    places = starts + tf.cast(route.sample_ids, tf.int64)
    sent = tf.gather(tf.concat(counts, 0), places)
    splits = tf.reduce_sum(route.sample_splits, axis=1)
    return collectives.all_to_all(sent, splits, label)[0]


def _samples_of_rows(pooling: Pooling, rows: tf.Tensor) -> tf.Tensor:
    """Counts the samples of each unique row; float32 `[rows]`."""
    pairs = row_counts.pairs(pooling.row_splits, pooling.positions)
    _, found = row_counts.without_repetitions(*pairs, rows)
    return tf.math.unsorted_segment_sum(
        tf.ones_like(found, tf.float32), found, rows
    )
