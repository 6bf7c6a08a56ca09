# SPDX-License-Identifier: Apache-2.0
"""The stages in a row: ids in, one pooled row per sample and feature out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.batches.ids import Ids
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.embedding import capture
from tfdist_ext.embedding import combiners
from tfdist_ext.embedding import stock_lookup
from tfdist_ext.embedding import unique_rows
from tfdist_ext.embedding import weights_of_data
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.input_dist import OwnedIds
from tfdist_ext.embedding.input_dist import Route
from tfdist_ext.embedding.input_dist import input_dist
from tfdist_ext.embedding.local import local_lookup
from tfdist_ext.embedding.lookup import lookup
from tfdist_ext.embedding.output_dist import output_dist
from tfdist_ext.embedding.rows_of_keys import rows_of_keys
from tfdist_ext.embedding.wire import Wire
from tfdist_ext.keras_internals import is_shape_inference
from tfdist_ext.prefetch import exchange_ahead
from tfdist_ext.prefetch.prefetched_ids import Ahead
from tfdist_ext.tables.choices import Storage


@dataclasses.dataclass(frozen=True)
class Asked:
    """What `input_dist` has brought, and what is needed to answer it.

    Attributes:
        owned: what this rank shall look up.
        route: the way back.
        poolings: of the features with unique rows, in order.
    """

    owned: OwnedIds
    route: Route
    poolings: list[unique_rows.Pooling]


def pooled_lookup(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    tables: Sequence[Any],
    collectives: Collectives | None,
    wire: Wire,
    ahead: Ahead | None = None,
    learn: bool = False,
) -> list[tf.Tensor]:
    """Looks up all features; those of partitioned tables in one exchange.

    One for tables on the hosts and one for those on GPUs, where there are both.

    Args:
        ids: per feature, the lists whose results are summed.
        features: what they are looked up in.
        tables: variables, this rank's part of each table.
        collectives: of the strategy, None in one process.
        wire: how numbers travel.
        ahead: the next batch, None to exchange ids when they are needed.
        learn: see `rows_of_keys`.

    Returns:
        Per feature float32 `[b, dim]`.

    Raises:
        ValueError: in a function that XLA is to compile.
    """
    asked = capture.Lookup(ids, features, tables, wire)
    plain = stock_lookup.answer_of(asked)
    if plain:
        return plain
    _refuse_xla(wire.label)
    known = None if ahead else capture.answer_of(asked)
    if known:
        return known
    ids = rows_of_keys(asked, collectives, learn)
    results: dict[int, tf.Tensor] = {}
    for (partitioned, storage), chosen in sorted(_together(features).items()):
        arguments = [ids[i] for i in chosen], [features[i] for i in chosen]
        if partitioned:
            assert collectives is not None
            # Exchanges of the one are told from those of the other.
            mark = "" if storage == "host" else f"/{storage}"
            own = dataclasses.replace(wire, label=wire.label + mark)
            exchange = _Exchange(arguments[1], collectives, own)
            with collectives.one_call(f"{own.label}/ids") as end:
                found = exchange.look_up(
                    arguments[0], tables, ahead and ahead.of(chosen, mark)
                )
                end(found)
        else:
            found = local_lookup(*arguments, tables)
        results.update(zip(chosen, found, strict=True))
    return [
        weights_of_data.refuse_gradient(
            combiners.combine(results[i], ids[i], each), ids[i], each.name
        )
        for i, each in enumerate(features)
    ]


def _together(
    features: Sequence[Feature],
) -> dict[tuple[bool, Storage], list[int]]:
    """The features whose tables are partitioned or not, and lie alike."""
    found: dict[tuple[bool, Storage], list[int]] = {}
    for index, feature in enumerate(features):
        kind = feature.spec.partitioned, feature.spec.storage
        found.setdefault(kind, []).append(index)
    return found


def look_up_together(
    lookups: Sequence[capture.Lookup], collectives: Collectives
) -> list[list[tf.Tensor]]:
    """Answers several lookups in one exchange per direction.

    Args:
        lookups: whose numbers travel alike.
        collectives: of the strategy.

    Returns:
        What `pooled_lookup` returns, for each of them.
    """
    tables: dict[int, Any] = {}
    features = []
    for each in lookups:
        for feature in each.features:
            table = each.tables[feature.table]
            tables[id(table)] = table
            index = list(tables).index(id(table))
            features.append(dataclasses.replace(feature, table=index))
    labels = ", ".join(each.wire.label for each in lookups)
    found = iter(
        pooled_lookup(
            [lists for each in lookups for lists in each.ids],
            features,
            list(tables.values()),
            collectives,
            dataclasses.replace(lookups[0].wire, label=labels),
        )
    )
    return [[next(found) for _ in each.features] for each in lookups]


def _rely_on_places(tables: Sequence[Any]) -> None:
    """Keeps the parts of tables where they are, as a graph relies on that.

    Not one that never runs.
    """
    if not tf.executing_eagerly() and not is_shape_inference():
        for table in tables:
            marks.fix(table)


def _refuse_xla(name: str) -> None:
    if internals.is_for_xla():
        raise ValueError(
            f"Layer '{name}' is called in a tf.function(jit_compile=True), or "
            "a model compiled with jit_compile=True. XLA cannot compile "
            "lookups and exchanges. Leave jit_compile out there, and put "
            "the dense layers alone, without this layer, into a "
            "tf.function(jit_compile=True)."
        )


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The way of ids to the ranks that own their rows, and of rows back."""

    features: list[Feature]
    collectives: Collectives
    wire: Wire

    def look_up(
        self,
        ids: Sequence[Sequence[Ids]],
        tables: Sequence[Any],
        ahead: Ahead | None,
    ) -> list[tf.Tensor]:
        _rely_on_places(tables)
        asked = self.ask(ids) if ahead is None else self.ask_ahead(ids, ahead)
        return self.answer(asked, tables)

    def ask(self, ids: Sequence[Sequence[Ids]]) -> Asked:
        asked = self._sent(ids, self.wire.label)
        self._check(asked)
        return asked

    def ask_ahead(
        self,
        ids: Sequence[Sequence[Ids]],
        ahead: Ahead,
    ) -> Asked:
        """`ask`, mostly answered by the step before."""
        label, samples = self.wire.label, ahead.samples
        asked, asked_next = exchange_ahead.exchange_ahead(
            lambda: self._sent_by_samples(ids, label, samples[0]),
            # Another label: both may be under way at once.
            lambda: self._sent_by_samples(
                ahead.ids, f"{label}/next", samples[1]
            ),
            ahead.position,
            ahead.place,
        )
        self._check(asked)
        # A bad id fails the step that finds it, before it writes.
        self._check(asked_next)
        return asked

    def _sent_by_samples(
        self, ids: Sequence[Sequence[Ids]], label: str, samples: tf.Tensor
    ) -> Asked:
        """Sends ids of a batch that need not be the step's, with its weight."""
        return self._sent(ids, label, tf.cast(samples, tf.float32))

    def _sent(
        self,
        ids: Sequence[Sequence[Ids]],
        label: str,
        weight: tf.Tensor | None = None,
    ) -> Asked:
        lists, poolings = self._travelling(ids)
        owned, route = input_dist(
            lists, self.features, self.collectives, label, weight
        )
        return Asked(owned, route, poolings)

    def _travelling(
        self, ids: Sequence[Sequence[Ids]]
    ) -> tuple[list[Sequence[Ids]], list[unique_rows.Pooling]]:
        """What leaves of the lists: of a feature of unique rows, unique ids."""
        lists = list(ids)
        poolings = []
        for index, feature in enumerate(self.features):
            if feature.unique:
                travel, pooling = unique_rows.ask_once(lists[index], feature)
                lists[index] = [travel]
                poolings.append(pooling)
        return lists, poolings

    def _check(self, asked: Asked) -> None:
        step = self.collectives.step
        if step is not None:
            step.checks.append(asked.owned.served)

    def answer(self, asked: Asked, tables: Sequence[Any]) -> list[tf.Tensor]:
        values, splits = lookup(tables, self.features, asked.owned)
        results = output_dist(
            values,
            splits,
            asked.route,
            self.features,
            self.collectives,
            self.wire,
        )
        poolings = iter(asked.poolings)
        return [
            unique_rows.pool(result, next(poolings))
            if feature.unique
            else result
            for result, feature in zip(results, self.features, strict=True)
        ]
