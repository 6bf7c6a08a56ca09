# SPDX-License-Identifier: Apache-2.0
"""Captures the lookups of a model, so that they share one exchange.

The model is first traced into a separate graph. The ops that compute the ids
are copied from it, to run before the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import TypeVar

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import thread_context
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import Wire
from tfdist_ext.thread_context import current
from tfdist_ext.type_names import Variable

# Stateful ops that may run twice, or earlier, because they change nothing.
_HARMLESS = {
    "Assert",
    "LookupTableFind",
    "LookupTableFindV2",
    "LookupTableSize",
    "LookupTableSizeV2",
}


class Subgraph:
    """Parts of a FuncGraph that depend only on its captured tensors.

    Args:
        graph: a FuncGraph; its captures are tensors of the current graph.
        forbidden: tensors of the FuncGraph that a copy must not depend on.
    """

    def __init__(
        self, graph: tf.Graph, forbidden: Iterable[tf.Tensor] = ()
    ) -> None:
        self._graph = graph
        self._outside = {inner.name: outer for outer, inner in graph.captures}
        self._forbidden = {tensor.op.name for tensor in forbidden}

    def can_be_copied(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Whether pure functions of captured tensors compute the tensors."""
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
        """Copies tensors to the current graph.

        Args:
            tensors: tensors of the FuncGraph; others are returned unchanged.

        Returns:
            The tensors of the current graph, in the same order.
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
        marks.keep_alive(here, self._graph)
        return imported

    def _ops_for(self, tensors: Iterable[tf.Tensor]) -> list[tf.Operation]:
        """Returns all ops that tensors depend on."""
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
Answers = list[tf.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """The arguments of a `pooled_lookup`.

    Attributes:
        ids: per feature, the lists whose results are summed.
        features: the features that are looked up.
        tables: variables, this rank's part of each table.
        wire: the wire format of the results.
    """

    ids: Sequence[Sequence[Ids]]
    features: Sequence[Feature]
    tables: Sequence[Variable]
    wire: Wire

    @property
    def tensors(self) -> list[tf.Tensor]:
        """All tensors of the ids."""
        return [
            tensor
            for lists in self.ids
            for part in lists
            for tensor in (part.values, part.row_splits, part.weights)
        ]


class _CannotShareError(Exception):
    """Ends a capture that must be discarded."""


class _Capture:
    """Records the lookups of a call in a graph, and answers them by zeros."""

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph
        self.refused = ""  # why this capture must be discarded
        self.lookups: list[Lookup] = []
        self.zeros: list[tf.Tensor] = []

    def answer(self, lookup: Lookup) -> Answers:
        if tf.compat.v1.get_default_graph() is not self._graph:
            # TensorFlow would cache the inner tf.function with these zeros.
            self.refused = f"a tf.function calls layer '{lookup.wire.label}'"
            raise _CannotShareError(self.refused)
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
        """Returns the answer to the next lookup, and moves on to the next."""
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
    """Returns the answer to a lookup whose ids are not needed again.

    Args:
        features: the features of the lookup.

    Returns:
        The answer, or None if the caller must look up the ids.
    """
    trace = current.capture
    return trace.known(features) if isinstance(trace, _Replay) else None


def shared(
    call: Callable[[], T],
    collectives: Collectives,
    look_up: Callable[[Sequence[Lookup]], list[Answers]],
    forget: Callable[[tf.Graph], None],
    failed: Callable[[str], None],
) -> T:
    """Returns the result of `call`, whose lookups share exchanges if possible.

    If the capture fails, each lookup has an exchange of its own.

    Args:
        call: calls a model, while a step is traced.
        collectives: the strategy's collectives.
        look_up: answers lookups of equal wire formats in one exchange.
        forget: removes tensors of the capture's graph, its argument, from
            layers. It is called after the capture.
        failed: receives the reason of a failed capture.
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
    except Exception as error:  # if the call is wrong, it raises again below
        # Keras adds lines to the text of an error.
        reason = capture.refused or f"{type(error).__name__}: {error}"
    finally:
        forget(graph)
    if reason is not None:
        failed(reason)
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
    """Groups lookups, by index, that can share an exchange before the call."""
    groups: dict[Wire, list[int]] = {}
    subgraph = Subgraph(graph, forbidden=capture.zeros)
    for index, lookup in enumerate(capture.lookups):
        if subgraph.can_be_copied(lookup.tensors):
            wire = dataclasses.replace(lookup.wire, label="")
            groups.setdefault(wire, []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def _copied(lookups: Sequence[Lookup], graph: tf.Graph) -> list[Lookup]:
    """Copies the ids of lookups to the graph of the step."""
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
