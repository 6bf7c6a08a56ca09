# SPDX-License-Identifier: Apache-2.0
"""The stages in a row: ids in, one pooled row per sample and feature out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.distribute.collectives import Collectives
from tfdist_ext.embedding import combiners
from tfdist_ext.embedding import distinct_rows
from tfdist_ext.embedding import hot_rows
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.frequent_ids import FrequentIds
from tfdist_ext.embedding.input_dist import input_dist
from tfdist_ext.embedding.input_dist import merge_local
from tfdist_ext.embedding.lookup import lookup
from tfdist_ext.embedding.output_dist import Wire
from tfdist_ext.embedding.output_dist import output_dist
from tfdist_ext.embedding.output_dist import split_local


def pooled_lookup(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    tables: Sequence[Any],
    collectives: Collectives | None,
    wire: Wire,
    frequent: FrequentIds | None = None,
) -> list[tf.Tensor]:
    """Looks up all features; those of partitioned tables in one exchange.

    Args:
        ids: per feature, the lists whose results are summed.
        features: what they are looked up in.
        tables: variables, this rank's part of each table.
        collectives: of the strategy, None in one process.
        wire: how numbers travel.
        frequent: of the tables, None to code all ids alike.

    Returns:
        Per feature float32 `[b, dim]`.
    """
    results: dict[int, tf.Tensor] = {}
    for partitioned in (False, True):
        chosen = [
            index
            for index, feature in enumerate(features)
            if feature.spec.partitioned == partitioned
        ]
        if not chosen:
            continue
        arguments = [ids[i] for i in chosen], [features[i] for i in chosen]
        if partitioned:
            assert collectives is not None
            found = _exchanged(*arguments, tables, collectives, wire, frequent)
        else:
            owned = merge_local(*arguments)
            values, _ = lookup(tables, arguments[1], owned)
            found = split_local(values, owned, arguments[1])
        results.update(zip(chosen, found, strict=True))
    return [
        combiners.combine(results[index], ids[index], feature)
        for index, feature in enumerate(features)
    ]


def _exchanged(
    ids: list[Sequence[Ids]],
    features: list[Feature],
    tables: Sequence[Any],
    collectives: Collectives,
    wire: Wire,
    frequent: FrequentIds | None,
) -> list[tf.Tensor]:
    poolings: dict[int, distinct_rows.Pooling] = {}
    hot: dict[int, hot_rows.HotIds] = {}
    for index, feature in enumerate(features):
        if feature.deduplicate:
            travel, poolings[index] = distinct_rows.ask_once(
                ids[index], feature
            )
            if feature.spec.hot_ids:
                travel, hot[index], poolings[index] = hot_rows.split_distinct(
                    travel, poolings[index], feature
                )
            ids[index] = [travel]
        elif feature.spec.hot_ids:
            travel, hot[index] = hot_rows.split(ids[index], feature)
            ids[index] = [travel]
    known: list[tf.Tensor] = []
    if frequent is not None:
        by_table = frequent.of_tables()
        known = [by_table[feature.table] for feature in features]
        frequent.note(ids, features)
    owned, route = input_dist(ids, features, collectives, wire.label, known)
    if hot:
        owned, route = hot_rows.ask_here(owned, route, hot, features)
    values, splits = lookup(tables, features, owned)
    results = output_dist(values, splits, route, features, collectives, wire)
    for index, pooling in poolings.items():
        results[index] = distinct_rows.pool(results[index], pooling)
    return results
