# SPDX-License-Identifier: Apache-2.0
"""Copies what computes some tensors from one graph into another."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext import marks

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
