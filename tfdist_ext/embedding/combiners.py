# SPDX-License-Identifier: Apache-2.0
"""Means of rows, made of their sums on the rank of the sample."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.batches.ids import Ids
from tfdist_ext.embedding.feature import Feature


def combine(
    sums: tf.Tensor, lists: Sequence[Ids], feature: Feature
) -> tf.Tensor:
    """Divides sums of weighted rows as the feature's combiner says.

    As `tf.nn.embedding_lookup_sparse`: "mean" divides by the sum of the
    weights, "sqrtn" by the square root of the sum of their squares. Samples
    without ids stay zero.

    Args:
        sums: float32 `[b, dim]`.
        lists: the ids that were summed.
        feature: its combiner and its policy for bad ids.

    Returns:
        float32 `[b, dim]`.
    """
    if feature.combiner == "sum":
        return sums
    squared = feature.combiner == "sqrtn"
    totals = tf.add_n([_weight_sums(ids, feature, squared) for ids in lists])
    divisors = tf.sqrt(totals) if squared else totals
    return tf.math.divide_no_nan(sums, divisors[:, tf.newaxis])


def _weight_sums(ids: Ids, feature: Feature, squared: bool) -> tf.Tensor:
    """Sums of the weights, or of their squares, of every sample's ids."""
    # A key without a row has one of zeros, which counts.
    drops = feature.out_of_range == "ignore" and feature.keys is None

    def of_ones() -> tf.Tensor:
        return tf.cast(ids.row_splits[1:] - ids.row_splits[:-1], tf.float32)

    def of_weights() -> tf.Tensor:
        count = tf.size(ids.values)
        weights = tf.concat(
            [ids.weights, tf.ones([count - tf.size(ids.weights)])], 0
        )
        if squared:
            weights = tf.square(weights)
        if drops:
            values = tf.cast(ids.values, tf.int64)
            known = (values >= 0) & (values < feature.spec.rows)
            weights = tf.where(known, weights, 0.0)
        ragged = tf.RaggedTensor.from_row_splits(
            weights, ids.row_splits, validate=False
        )
        return tf.reduce_sum(ragged, axis=1)

    if drops:
        return of_weights()
    if ids.weights.shape.num_elements() == 0:
        return of_ones()
    return tf.cond(tf.size(ids.weights) > 0, of_weights, of_ones)
