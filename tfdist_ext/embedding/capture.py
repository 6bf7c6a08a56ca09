# SPDX-License-Identifier: Apache-2.0
"""Captures the lookups of a model, so that they share one exchange.

What computes the ids is copied out of a trace of the model, ahead of it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import thread_context
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import Wire
from tfdist_ext.thread_context import current

# Stateful ops that may be run once more, or earlier: they change nothing.
_HARMLESS = {
    "Assert",
    "LookupTableFind",
    "LookupTableFindV2",
    "LookupTableSize",
    "LookupTableSizeV2",
}


class Subgraph:
    """Parts of a FuncGraph that hang on what it has captured.

    Args:
        graph: a FuncGraph; what it captures is of the current graph.
        forbidden: tensors of it that a copy must not need.
    """

    def __init__(
        self, graph: tf.Graph, forbidden: Iterable[tf.Tensor] = ()
    ) -> None:
        self._graph = graph
        self._outside = {inner.name: outer for outer, inner in graph.captures}
        self._forbidden = {tensor.op.name for tensor in forbidden}

    def can_be_copied(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Whether only pure functions of what is captured make them."""
        graphs = (self._graph, tf.compat.v1.get_default_graph())
        if any(
            tf.is_symbolic_tensor(t) and t.graph not in graphs for t in tensors
        ):
            return False
        inside = filter(self._has, tensors)
        return not any(
            op.name in self._forbidden
            or (op.op_def.is_stateful and op.type not in _HARMLESS)
            for op in self._ops_for(inside)
        )

    def copy(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The same tensors in the current graph.

        Args:
            tensors: of the FuncGraph; others are returned as they are.
        """
        inside = {t.name: t for t in tensors if self._has(t)}
        made = dict(self._outside)
        wanted = [name for name in inside if name not in made]
        if wanted:
            copies = self._imported(inside, wanted)
            for name, copied in zip(wanted, copies, strict=True):
                copied.set_shape(inside[name].shape)
                made[name] = copied
        return [made[t.name] if self._has(t) else t for t in tensors]

    def _has(self, tensor: tf.Tensor) -> bool:
        return tf.is_symbolic_tensor(tensor) and tensor.graph is self._graph

    def _imported(
        self, inside: dict[str, tf.Tensor], wanted: Sequence[str]
    ) -> list[tf.Tensor]:
        ops = self._ops_for([inside[name] for name in wanted])
        captured = {name.partition(":")[0] for name in self._outside}
        names = {op.name for op in ops} - captured
        whole = self._graph.as_graph_def()
        part = tf.compat.v1.GraphDef(
            versions=whole.versions, library=whole.library
        )
        for node in whole.node:
            if node.name in names:
                part.node.add().CopyFrom(node)
        used = {each.name for op in ops for each in op.inputs}
        here = tf.compat.v1.get_default_graph()
        imported: list[tf.Tensor] = tf.graph_util.import_graph_def(
            part,
            input_map={
                name: here.capture(outer)
                for name, outer in self._outside.items()
                if name in used
            },
            return_elements=list(wanted),
            name="shared_lookup",
        )
        marks.keep(here, self._graph)
        return imported

    def _ops_for(self, tensors: Iterable[tf.Tensor]) -> list[tf.Operation]:
        """All ops that have to run for some tensors."""
        found: dict[str, tf.Operation] = {}
        pending = [tensor.op for tensor in tensors]
        while pending:
            op = pending.pop()
            if op.name not in found:
                found[op.name] = op
                pending += [each.op for each in op.inputs]
                pending += op.control_inputs
        return list(found.values())


T = TypeVar("T")
_LOG = logging.getLogger("tfdist_ext")
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
    """Ends a capture of which nothing may remain."""


class _Capture:
    """Captures the lookups of a call in a graph."""

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


class _Replay:
    """Returns the answers that are known, in the order of the capture."""

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
        captured = [each.name for each in self._lookups[index].features]
        if captured != [each.name for each in features]:
            return None
        self._next += 1
        return self._answers[index]


def is_active() -> bool:
    """Whether this thread traces a call for a capture, or after one."""
    return current.capture is not None


def answer_of(lookup: Lookup) -> Answers | None:
    """The answer to a lookup of a captured call, None if it has none yet."""
    trace: _Capture | _Replay | None = current.capture
    return None if trace is None else trace.answer(lookup)


def known_answer(features: Sequence[Feature]) -> Answers | None:
    """The answer to a lookup that need not say its ids a second time.

    Args:
        features: of the lookup.

    Returns:
        None if the lookup is to be made, with its ids.
    """
    trace = current.capture
    return trace.known(features) if isinstance(trace, _Replay) else None


def shared(
    call: Callable[[], T],
    collectives: Collectives,
    look_up: Callable[[Sequence[Lookup]], list[Answers]],
    forget: Callable[[tf.Graph], None],
) -> T:
    """What `call` returns, its lookups in as few exchanges as possible.

    Where the capture fails, the lookups are exchanged one by one; the reason is
    logged at debug level.

    Args:
        call: of a model, while a step is traced.
        collectives: of the strategy.
        look_up: answers lookups that travel alike, in one exchange.
        forget: is called with the graph of the capture afterwards, to remove
            tensors of it that layers have kept.
    """
    graph = tf.__internal__.FuncGraph("capture")
    capture = _Capture(graph)
    reason = None
    try:
        with (
            collectives.capturing(graph),
            graph.as_default(),
            thread_context.setting(capture=capture),
        ):
            call()
    except Exception as error:  # where the call is wrong, it raises it below
        reason = f"{type(error).__name__}: {error}"
    finally:
        forget(graph)
    if reason is not None:
        _LOG.debug("Layers of a model share no exchange: %s", reason)
        return call()
    answers: dict[int, Answers] = {}
    for indices in _groups(capture, graph):
        chosen = [capture.lookups[index] for index in indices]
        found = look_up(_copied(chosen, graph))
        answers.update(zip(indices, found, strict=True))
    if not answers:
        return call()
    replay = _Replay(capture.lookups, answers)
    with thread_context.setting(capture=replay):
        return call()


def _groups(capture: _Capture, graph: tf.Graph) -> list[list[int]]:
    """Lookups, by number, that can share an exchange before all others."""
    groups: dict[Wire, list[int]] = {}
    subgraph = Subgraph(graph, forbidden=capture.zeros)
    for index, lookup in enumerate(capture.lookups):
        if subgraph.can_be_copied(lookup.tensors):
            alike = dataclasses.replace(lookup.wire, label="")
            groups.setdefault(alike, []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def _copied(lookups: Sequence[Lookup], graph: tf.Graph) -> list[Lookup]:
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
