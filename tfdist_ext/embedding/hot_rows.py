# SPDX-License-Identifier: Apache-2.0
"""Around the exchange of a table with hot rows: their ids stay at home.

Hot rows lie on every rank, behind the rows that the rank owns. A batch's hot
ids are looked up in the same op as the rows that other ranks ask for, as if
one more rank, number `world_size`, asked; its results stay, and are added to
those of the owners as the part of one more owner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.embedding.distinct_rows import Pooling
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.input_dist import OwnedIds
from tfdist_ext.embedding.input_dist import Route
from tfdist_ext.embedding.input_dist import join_lists
from tfdist_ext.ops import id_ops


@dataclasses.dataclass(frozen=True)
class HotIds:
    """What a batch asks of the hot rows.

    Attributes:
        samples: int32 `[m]`, those that have hot ids, ascending.
        rows: of these samples, in the local variable.
    """

    samples: tf.Tensor
    rows: Ids


def split(lists: Sequence[Ids], feature: Feature) -> tuple[Ids, HotIds]:
    """Tells the ids that travel from those that do not.

    Args:
        lists: the lists whose results are summed.
        feature: what they are looked up in.
    """
    values = [part.values for part in lists]
    if len({each.dtype for each in values}) > 1:
        values = [tf.cast(each, tf.int64) for each in values]
    parts = id_ops.split_hot_ids(
        values,
        [part.row_splits for part in lists],
        [part.weights for part in lists],
        hot_ids=feature.spec.hot_ids,
        first_row=feature.spec.local_rows,
    )
    cold_ids, cold_splits, cold_weights, samples, splits, rows, weights = parts
    return (
        Ids(cold_ids, cold_splits, cold_weights),
        HotIds(samples, Ids(rows, splits, weights)),
    )


def split_distinct(
    distinct: Ids, pooling: Pooling, feature: Feature
) -> tuple[Ids, HotIds, Pooling]:
    """The same for what a batch asks once: the cold rows first, then the hot.

    Args:
        distinct: distinct ids, as samples of one id each.
        pooling: of the batch.
        feature: what they are looked up in.
    """
    cold, hot = split([distinct], feature)
    before = cold.row_splits[:-1]
    count = cold.row_splits[-1]
    place = tf.where(
        cold.row_splits[1:] > before,
        before,
        count + distinct.row_splits[:-1] - before,
    )
    pooling = dataclasses.replace(
        pooling, positions=tf.gather(place, pooling.positions)
    )
    cold = dataclasses.replace(cold, row_splits=tf.range(count + 1))
    samples = tf.range(count, tf.size(place, tf.int64))
    return cold, HotIds(tf.cast(samples, tf.int32), hot.rows), pooling


def ask_here(
    owned: OwnedIds,
    route: Route,
    hot: Mapping[int, HotIds],
    features: Sequence[Feature],
) -> tuple[OwnedIds, Route]:
    """Adds the hot ids as those of one more rank.

    Args:
        owned: from `input_dist`.
        route: from `input_dist`.
        hot: by the index of the feature.
        features: of the exchange.

    Returns:
        `owned` and `route` of `world_size + 1` ranks.
    """
    none = tf.zeros([], tf.int64)
    counts = [
        tf.size(hot[index].samples, tf.int64) if index in hot else none
        for index in range(len(features))
    ]
    asked = tf.stack(counts)[tf.newaxis]
    # Of a deduplicated feature, samples are distinct rows: the hot ones have
    # not been counted.
    samples = route.samples + tf.stack(
        [
            count if feature.deduplicate else none
            for count, feature in zip(counts, features, strict=True)
        ]
    )
    mine = [hot[index] for index in sorted(hot)]
    joined = join_lists(
        [
            Ids(owned.rows, owned.row_splits, owned.weights),
            *(each.rows for each in mine),
        ]
    )
    return (
        OwnedIds(
            joined.row_splits,
            joined.values,
            joined.weights,
            tf.concat([owned.served, asked], 0),
        ),
        Route(
            samples,
            tf.concat([route.sample_ids, *(h.samples for h in mine)], 0),
            tf.concat([route.sample_splits, asked], 0),
            route.gradient_scale,
        ),
    )
