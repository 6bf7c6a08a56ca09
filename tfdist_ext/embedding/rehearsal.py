# SPDX-License-Identifier: Apache-2.0
"""One exchange for the lookups of all layers of a model.

A layer that is called must answer at once, before the next one is known. So a
call of a model is traced twice. In the rehearsal, in a graph that never runs,
lookups answer with zeros and note what they are asked for. Those whose ids
come from the data alone are then looked up together, and when the call is
traced for good, every lookup finds its answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.batches.ids import Ids
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.subgraph import Subgraph
from tfdist_ext.embedding.wire import Wire

T = TypeVar("T")
Answers = list[tf.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """What `pooled_lookup` is asked for.

    Attributes:
        ids: per feature, the lists whose results are summed.
        features: what they are looked up in.
        tables: variables, this rank's part of each table.
        wire: how numbers travel.
    """

    ids: Sequence[Sequence[Ids]]
    features: Sequence[Feature]
    tables: Sequence[Any]
    wire: Wire

    @property
    def tensors(self) -> list[tf.Tensor]:
        """All that the ids consist of."""
        return [
            tensor
            for lists in self.ids
            for part in lists
            for tensor in (part.values, part.row_splits, part.weights)
        ]


class _CannotShareError(Exception):
    """Ends a rehearsal of which nothing may remain."""


class _Rehearsal:
    """Notes the lookups of a call, made in a graph."""

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph
        self.lookups: list[Lookup] = []
        self.zeros: list[tf.Tensor] = []

    def answer(self, lookup: Lookup) -> Answers:
        if tf.compat.v1.get_default_graph() is not self._graph:
            # A tf.function would be kept with its zeros.
            raise _CannotShareError(f"'{lookup.wire.label}' in a tf.function")
        self.lookups.append(lookup)
        answers = [
            tf.zeros([tf.size(lists[0].row_splits) - 1, feature.spec.dim])
            for lists, feature in zip(lookup.ids, lookup.features, strict=True)
        ]
        self.zeros += answers
        return answers


class _Performance:
    """Hands out the answers that are known, in the order of the rehearsal."""

    def __init__(
        self, lookups: Sequence[Lookup], answers: dict[int, Answers]
    ) -> None:
        self._lookups = lookups
        self._answers = answers
        self._next = 0

    def answer(self, lookup: Lookup) -> Answers | None:
        known = self.known(lookup.features)
        if known is None:
            self._next += 1
        return known

    def known(self, features: Sequence[Feature]) -> Answers | None:
        """The answer to the next lookup, which then is the one after it."""
        index = self._next
        if index >= len(self._lookups) or index not in self._answers:
            return None
        rehearsed = [each.name for each in self._lookups[index].features]
        if rehearsed != [each.name for each in features]:
            return None
        self._next += 1
        return self._answers[index]


class _Now(threading.local):
    act: _Rehearsal | _Performance | None = None


_now = _Now()


def is_under_way() -> bool:
    """Whether this thread traces a call that has been, or is, rehearsed."""
    return _now.act is not None


def answer_of(lookup: Lookup) -> Answers | None:
    """The answer to a lookup of a rehearsed call, None if it has none yet."""
    return None if _now.act is None else _now.act.answer(lookup)


def known_answer(features: Sequence[Feature]) -> Answers | None:
    """The answer to a lookup that need not say its ids a second time.

    Args:
        features: of the lookup.

    Returns:
        None if the lookup is to be made, with its ids.
    """
    act = _now.act
    return act.known(features) if isinstance(act, _Performance) else None


@contextlib.contextmanager
def _acting(act: _Rehearsal | _Performance) -> Iterator[None]:
    _now.act = act
    try:
        yield
    finally:
        _now.act = None


def shared(
    call: Callable[[], T],
    collectives: Collectives,
    look_up: Callable[[Sequence[Lookup]], list[Answers]],
    forget: Callable[[tf.Graph], None],
) -> T:
    """What `call` returns, its lookups in as few exchanges as they can be.

    Args:
        call: of a model, while a step is traced.
        collectives: of the strategy.
        look_up: answers lookups that travel alike, in one exchange.
        forget: is told the graph of the rehearsal when it is over, to rid
            the model of tensors that it has kept.
    """
    graph = internals.FuncGraph("rehearsal")
    rehearsal = _Rehearsal(graph)
    failed = False
    try:
        with (
            collectives.rehearsing(graph),
            graph.as_default(),
            _acting(rehearsal),
        ):
            call()
    except Exception:  # the call itself is to raise it, or cannot share
        failed = True
    finally:
        forget(graph)
    if failed:
        return call()
    answers: dict[int, Answers] = {}
    for indices in _groups(rehearsal, graph):
        chosen = [rehearsal.lookups[index] for index in indices]
        found = look_up(_brought(chosen, graph))
        answers.update(zip(indices, found, strict=True))
    if not answers:
        return call()
    with _acting(_Performance(rehearsal.lookups, answers)):
        return call()


def _groups(rehearsal: _Rehearsal, graph: tf.Graph) -> list[list[int]]:
    """Lookups, by number, that can be made at once before all others."""
    groups: dict[Wire, list[int]] = {}
    subgraph = Subgraph(graph, forbidden=rehearsal.zeros)
    for index, lookup in enumerate(rehearsal.lookups):
        if subgraph.can_be_copied(lookup.tensors):
            alike = dataclasses.replace(lookup.wire, label="")
            groups.setdefault(alike, []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def _brought(lookups: Sequence[Lookup], graph: tf.Graph) -> list[Lookup]:
    """The lookups with their ids in the graph of the step."""
    copied = iter(
        Subgraph(graph).copy([t for each in lookups for t in each.tensors])
    )
    return [
        dataclasses.replace(
            lookup,
            ids=[
                [Ids(next(copied), next(copied), next(copied)) for _ in lists]
                for lists in lookup.ids
            ],
        )
        for lookup in lookups
    ]
