# SPDX-License-Identifier: Apache-2.0
"""Lookup of features: returns one pooled row per sample and feature."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext import thread_context
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import capture
from tfdist_ext.embedding import deferred_rows
from tfdist_ext.embedding import exchange
from tfdist_ext.embedding.capture import Lookup
from tfdist_ext.embedding.exchange import OwnedIds
from tfdist_ext.embedding.exchange import Route
from tfdist_ext.embedding.exchange import input_dist
from tfdist_ext.embedding.exchange import local_lookup
from tfdist_ext.embedding.exchange import lookup
from tfdist_ext.embedding.exchange import output_dist
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import Wire
from tfdist_ext.embedding.owner_rows import look_up_at_owners
from tfdist_ext.embedding.prefetched_ids import Ahead
from tfdist_ext.embedding.prefetched_ids import exchange_ahead
from tfdist_ext.embedding.row_copies import Found
from tfdist_ext.embedding.rows_of_keys import rows_of_keys
from tfdist_ext.embedding.samples_of_rows import samples_of_lists
from tfdist_ext.keras_internals import is_shape_inference
from tfdist_ext.tables.checks import Storage
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.thread_context import current
from tfdist_ext.type_names import Variable


def refuse_gradient(
    result: tf.Tensor, lists: Sequence[Ids], feature: str
) -> tf.Tensor:
    """Makes a gradient with respect to the weights of ids an error.

    Args:
        result: the result of a lookup.
        lists: the ids that were looked up, with or without weights.
        feature: the feature's name, for the error.

    Returns:
        The result. If TensorFlow needs the gradient of a weight, it raises a
        LookupError.
    """
    for each in lists:
        if each.weights.shape.num_elements() != 0:
            weights = tf.raw_ops.PreventGradient(
                input=each.weights,
                message=f"the weights of the ids of '{feature}' have no "
                "gradient, so what computes them would not be trained. Use "
                "tf.stop_gradient(weights), or multiply looked-up rows.",
            )
            result = _connected(result, weights)
    return result


@tf.custom_gradient
def _connected(
    result: tf.Tensor, weights: tf.Tensor
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]]:
    """Returns `result`, connected on the tape to `weights`."""

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return upstream, tf.zeros_like(weights)

    return tf.identity(result), gradient


Answer = Callable[[Lookup], list[tf.Tensor]]
# Returns the rows float32 `[n, dim]` of ids int64 `[n]`.
RowsOf = Callable[[tf.Tensor], tf.Tensor]


def answering(answer: Answer) -> AbstractContextManager[None]:
    """Lookups of this thread inside are answered by `answer`."""
    return thread_context.setting(answer=answer)


def is_asked() -> bool:
    """Whether this thread traces a model that leaves the ranks."""
    return current.answer is not None


def answer_of(lookup: Lookup) -> list[tf.Tensor] | None:
    """The answer to a lookup of a model that leaves, None of all others."""
    return None if current.answer is None else current.answer(lookup)


def all_rows(table: Variable, spec: ShardSpec) -> tf.Tensor:
    """Returns all rows of a table in an exported model, float32 `[rows, dim]`.

    Args:
        table: the table's variable.
        spec: the spec of any part of the table.
    """
    every = tf.range(spec.rows + 1, dtype=tf.int64)
    ids = Ids(every[:-1], every, tf.zeros([0]))
    asked = Lookup([[ids]], [Feature(spec.table, 0, spec)], [table], Wire())
    answer = answer_of(asked)
    assert answer is not None
    return answer[0]


def look_up(
    lists: Sequence[Ids], feature: Feature, rows_of: RowsOf
) -> tf.Tensor:
    """Looks up and combines the rows of every sample with stock ops.

    Rows are summed in the order of the sample's ids.

    Args:
        lists: the ids whose results are summed.
        feature: the feature, with its combiner and `out_of_range`. With
            "error", the op that reads the rows reports bad ids.
        rows_of: a function that reads rows of the table.

    Returns:
        The combined rows, float32 `[b, dim]`.
    """
    ids = tf.concat([tf.cast(part.values, tf.int64) for part in lists], 0)
    samples = [
        tf.ragged.row_splits_to_segment_ids(part.row_splits) for part in lists
    ]
    count = tf.size(lists[0].row_splits, tf.int64) - 1
    if feature.out_of_range == "ignore":
        known = (ids >= 0) & (ids < feature.spec.rows)
        rows = rows_of(tf.where(known, ids, 0))
        rows = tf.where(known[:, tf.newaxis], rows, 0.0)
    else:
        rows = rows_of(ids)
    if any(part.weights.shape.num_elements() != 0 for part in lists):
        weights = tf.concat([_weights(part) for part in lists], 0)
        rows *= weights[:, tf.newaxis]
    sums = tf.math.unsorted_segment_sum(rows, tf.concat(samples, 0), count)
    sums.set_shape([None, feature.spec.dim])
    return exchange.combine(sums, lists, feature)


def _weights(part: Ids) -> tf.Tensor:
    """Returns the weight of every id, 1 for ids without weights."""
    missing = tf.size(part.values) - tf.size(part.weights)
    return tf.concat([part.weights, tf.ones([missing])], 0)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The result of `input_dist`, and how to pool its answer.

    Attributes:
        owned: the rows that this rank must look up.
        route: the return route.
        poolings: one `Pooling` for each feature with unique rows, in order.
        lists: per feature, the lists that are looked up, if their gradients
            are kept; otherwise empty.
        found: indices of features, and what this rank has of their rows.
    """

    owned: OwnedIds
    route: Route
    poolings: list[exchange.Pooling]
    lists: list[list[Ids]]
    found: list[tuple[int, Found]] = dataclasses.field(default_factory=list)


def pooled_lookup(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    tables: Sequence[Variable],
    collectives: Collectives | None,
    wire: Wire,
    ahead: Ahead | None = None,
    learn: bool = False,
) -> list[tf.Tensor]:
    """Looks up all features; those of partitioned tables in one exchange.

    Tables on hosts and tables on GPUs have separate exchanges.

    Args:
        ids: per feature, the lists whose results are summed.
        features: the features that are looked up.
        tables: variables, this rank's part of each table.
        collectives: the strategy's collectives; None in one process.
        wire: the wire format of the results.
        ahead: the next batch; None exchanges only this batch's ids. If there
            are dynamic vocabularies, its keys are exchanged and not its ids.
        learn: see `rows_of_keys`.

    Returns:
        Per feature the combined rows, float32 `[b, dim]`.

    Raises:
        ValueError: in a function that XLA compiles.
    """
    asked = capture.Lookup(ids, features, tables, wire)
    plain = answer_of(asked)
    if plain:
        return plain
    _refuse_xla(wire.label)
    known = None if ahead else capture.answer_of(asked)
    if known:
        return known
    ids, remember = rows_of_keys(asked, collectives, learn, ahead)
    if any(feature.keys is not None for feature in features):
        ahead = None  # The keys of a batch have rows in its own step.
    results = _results(ids, asked, collectives, ahead)
    remember(results)
    return [
        refuse_gradient(
            exchange.combine(results[i], ids[i], each), ids[i], each.name
        )
        for i, each in enumerate(features)
    ]


def _results(
    ids: Sequence[Sequence[Ids]],
    asked: Lookup,
    collectives: Collectives | None,
    ahead: Ahead | None,
) -> list[tf.Tensor]:
    """Returns per feature the sums of the rows of `ids`, not yet combined."""
    features, tables, wire = asked.features, asked.tables, asked.wire
    results: dict[int, tf.Tensor] = {}
    for (partitioned, storage), chosen in sorted(_grouped(features).items()):
        arguments = [ids[i] for i in chosen], [features[i] for i in chosen]
        if partitioned:
            assert collectives is not None
            # The two exchanges need different labels.
            mark = "" if storage == "host" else f"/{storage}"
            own = dataclasses.replace(wire, label=wire.label + mark)
            stages = _Exchange(arguments[1], collectives, own)
            with collectives.one_call(f"{own.label}/ids") as end:
                found = stages.look_up(
                    arguments[0], tables, ahead and ahead.of(chosen, mark)
                )
                end(found)
        else:
            found = local_lookup(*arguments, tables)
        results.update(zip(chosen, found, strict=True))
    return [results[i] for i in range(len(features))]


def _grouped(
    features: Sequence[Feature],
) -> dict[tuple[bool, Storage], list[int]]:
    """Groups features by whether their tables are partitioned, and storage."""
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
        lookups: lookups with equal wire formats.
        collectives: the strategy's collectives.

    Returns:
        For each lookup the result of `pooled_lookup`.
    """
    tables: dict[int, Variable] = {}
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


def _fix_placements(tables: Sequence[Variable]) -> None:
    """Marks tables as fixed, because a graph relies on their placement.

    Graphs that only infer shapes do not, because they never run.
    """
    if not tf.executing_eagerly() and not is_shape_inference():
        for table in tables:
            marks.fix(table)


def _refuse_xla(name: str) -> None:
    if internals.is_for_xla():
        raise ValueError(
            f"Layer '{name}' is called in a tf.function(jit_compile=True), or "
            "a model compiled with jit_compile=True. XLA cannot compile "
            "lookups and exchanges. Leave jit_compile out there, and call "
            "only the dense layers, without this layer, in a "
            "tf.function(jit_compile=True)."
        )


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The exchange of ids with the owners of their rows, and of results."""

    features: list[Feature]
    collectives: Collectives
    wire: Wire

    def __post_init__(self) -> None:
        on_gpu = self.features[0].spec.storage == "device"
        if self.wire.dtype == "int8" and on_gpu:
            layer = self.wire.label.removesuffix("/device")
            raise ValueError(
                f"Layer '{layer}': wire_dtype='int8' is for tables in the "
                "memory of hosts, and a GPU has no code for it. Received: "
                "wire_dtype='int8' with storage='device'. Use "
                "wire_dtype='bfloat16', or storage='host'."
            )
        if self._keeps_rows:
            deferred_rows.check(self.features)

    @property
    def _keeps_rows(self) -> bool:
        """Whether gradients are kept; a check compares a step without that."""
        return self.collectives.keeps_rows and self.collectives.trial is None

    def look_up(
        self,
        ids: Sequence[Sequence[Ids]],
        tables: Sequence[Variable],
        ahead: Ahead | None,
    ) -> list[tf.Tensor]:
        _fix_placements(tables)
        step = self.collectives.step
        if step is not None and step.asynchronous:
            if ahead is not None:
                raise ValueError(
                    f"Layer '{self.features[0].name}': ids are exchanged ahead "
                    "(prefetch), which needs all ranks in the same step. Leave "
                    "it out with consistency.SSP and consistency.BAP."
                )
            return self._ask_owners(ids, tables)
        if ahead is None:
            asked = self.ask(ids, tables)
        else:
            asked = self.ask_ahead(ids, ahead)
        return self.answer(asked, tables)

    def _ask_owners(
        self, ids: Sequence[Sequence[Ids]], tables: Sequence[Variable]
    ) -> list[tf.Tensor]:
        lists, poolings = self._without_duplicates(ids)
        results = look_up_at_owners(
            *(lists, self.features, tables, self.collectives, self.wire)
        )
        return self._pooled(results, poolings)

    def ask(
        self, ids: Sequence[Sequence[Ids]], tables: Sequence[Variable]
    ) -> Asked:
        asked = self._sent(ids, self.wire.label, tables=tables)
        self._check(asked)
        return asked

    def ask_ahead(
        self,
        ids: Sequence[Sequence[Ids]],
        ahead: Ahead,
    ) -> Asked:
        """Returns the result of `ask`, usually stored by the last step."""
        label, samples = self.wire.label, ahead.samples
        asked, asked_next = exchange_ahead(
            lambda: self._sent_by_samples(ids, label, samples[0]),
            # Both exchanges may run at once, so they need different labels.
            lambda: self._sent_by_samples(
                ahead.ids, f"{label}/next", samples[1]
            ),
            ahead.position,
            ahead.place,
        )
        self._check(asked)
        # A bad id fails the step that receives it, before the step writes.
        self._check(asked_next)
        return asked

    def _sent_by_samples(
        self, ids: Sequence[Sequence[Ids]], label: str, samples: tf.Tensor
    ) -> Asked:
        """Sends ids of a batch that may be the next one, with its weight."""
        return self._sent(ids, label, tf.cast(samples, tf.float32))

    def _sent(
        self,
        ids: Sequence[Sequence[Ids]],
        label: str,
        weight: tf.Tensor | None = None,
        tables: Sequence[Variable] = (),
    ) -> Asked:
        lists, poolings = self._without_duplicates(ids)
        kept = list(map(list, lists)) if self._keeps_rows else []
        found = self._find_copies(lists, tables)
        for index, each in found:
            lists[index] = [exchange.each_alone(each.missing)]
        owned, route = input_dist(
            lists, self.features, self.collectives, label, weight
        )
        return Asked(owned, route, poolings, kept, found)

    def _find_copies(
        self, lists: Sequence[Sequence[Ids]], tables: Sequence[Variable]
    ) -> list[tuple[int, Found]]:
        """Indices of features with unique rows, and what this rank has."""
        copies = self.collectives.row_copies
        if copies is None or not self._keeps_rows or not tables:
            return []
        return [
            (i, copies.find(lists[i][0].values, each, tables[each.table]))
            for i, each in enumerate(self.features)
            if each.unique and each.keys is None
        ]

    def _without_duplicates(
        self, ids: Sequence[Sequence[Ids]]
    ) -> tuple[list[Sequence[Ids]], list[exchange.Pooling]]:
        """Replaces the ids of features with unique rows by unique ids."""
        lists = list(ids)
        poolings = []
        for index, feature in enumerate(self.features):
            if feature.unique:
                sent, pooling = exchange.ask_once(lists[index], feature)
                lists[index] = [sent]
                poolings.append(pooling)
        return lists, poolings

    def _check(self, asked: Asked) -> None:
        step = self.collectives.step
        if step is not None:
            step.checks.append(asked.owned.served)

    def answer(
        self, asked: Asked, tables: Sequence[Variable]
    ) -> list[tf.Tensor]:
        marks.set_samples_of_lists(
            asked.owned.rows, lambda: self._samples_of_lists(asked)
        )

        def look_up() -> list[tf.Tensor]:
            values, splits = lookup(tables, self.features, asked.owned)
            results = output_dist(
                values,
                splits,
                asked.route,
                self.features,
                self.collectives,
                self.wire,
            )
            for index, each in asked.found:
                results[index] = each.complete(results[index])
            return results

        if self._keeps_rows:
            results = deferred_rows.deferring(
                *(look_up, asked.lists, self.features, tables),
                *(asked.route.gradient_scale, self.wire),
                counts=[each.count for _, each in asked.found],
            )
        else:
            results = look_up()
        return self._pooled(results, asked.poolings)

    def _pooled(
        self,
        results: Sequence[tf.Tensor],
        poolings: Sequence[exchange.Pooling],
    ) -> list[tf.Tensor]:
        """Sums the rows of features whose unique rows were sent."""
        of_unique = iter(poolings)
        return [
            exchange.pool(result, next(of_unique)) if feature.unique else result
            for result, feature in zip(results, self.features, strict=True)
        ]

    def _samples_of_lists(self, asked: Asked) -> tf.Tensor:
        """Sends how many samples have each row that is looked up once.

        Only an optimizer that needs it asks; see `RowCounts`.

        Args:
            asked: the ids that were exchanged.

        Returns:
            float32 `[S]`, for each list of `asked.owned`.
        """
        step = self.collectives.step
        lists = tf.size(asked.owned.row_splits) - 1
        ones = tf.ones([lists])
        if any(feature.unique for feature in self.features):
            ones = samples_of_lists(
                asked.route,
                asked.poolings,
                self.features,
                self.collectives,
                f"{self.wire.label}/samples of rows",
            )
        if step is not None and step.checking:  # Every rank has all samples.
            ones /= self.collectives.group.world_size
        return ones
