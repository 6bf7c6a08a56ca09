# SPDX-License-Identifier: Apache-2.0
"""Computes functions of sums and means over samples for the global batch.

A loss such as `sqrt(reduce_mean(errors))` or `sum(x * m) / sum(m)` is not the
average of the ranks' losses. To compute it for the global batch, the ops
between its reductions over the batch and the loss are copied, and the copies
get the reductions of all ranks. If a reduction depends on another one (a
variance on a mean), there are several levels, each with one exchange.

    rank 0 has 4 samples, rank 1 has 2
    loss = sqrt(reduce_mean(errors))
    copy = sqrt(all_reduce(reduce_mean(errors)))       equal on both ranks

The gradient is computed in the opposite direction. Every rank differentiates
its share of the value, so that the sum over the ranks is the gradient. The
gradient of an all-reduce is an all-reduce.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.numbers.dependence import BatchDependence
from tfdist_ext.numbers.kinds import COUNT
from tfdist_ext.numbers.kinds import COUPLED
from tfdist_ext.numbers.kinds import LINEAR
from tfdist_ext.numbers.kinds import MEAN
from tfdist_ext.numbers.kinds import STATIC
from tfdist_ext.numbers.kinds import SUM
from tfdist_ext.type_names import WithGradient

_REDUCE_AGAIN: dict[str, Callable[..., tf.Tensor]] = {
    "All": tf.reduce_all,
    "Any": tf.reduce_any,
    "EuclideanNorm": tf.math.reduce_euclidean_norm,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
    "Prod": tf.reduce_prod,
}
_LABEL = "batch/reductions"


@dataclasses.dataclass(frozen=True)
class Whole:
    """A value of the global batch.

    Attributes:
        value: the tensor; equal on all ranks if it has no batch axis.
        leaves: tensors of the original graph that it was computed from.
        has_rows: whether it has a row for each sample of this rank.
    """

    value: tf.Tensor
    leaves: list[tf.Tensor]
    has_rows: bool

    def gradients(
        self, upstream: tf.Tensor | None, share: tf.Tensor
    ) -> list[tf.Tensor]:
        """Gradients by the leaves, to be averaged over the ranks by samples.

        Args:
            upstream: the gradient by the value; None for 1.
            share: fraction of all ranks' samples that this rank has.

        Returns:
            For each leaf a tensor, or None if the value does not depend on it.
        """
        seed = tf.ones_like(self.value) if upstream is None else upstream
        share = tf.cast(share, self.value.dtype)
        if not self.has_rows:
            seed = seed * share
        floating = [leaf for leaf in self.leaves if leaf.dtype.is_floating]
        found = tf.gradients(
            self.value, floating, grad_ys=seed, stop_gradients=floating
        )
        by_name = {
            leaf.name: tf.math.divide_no_nan(
                tf.convert_to_tensor(grad), tf.cast(share, grad.dtype)
            )
            for leaf, grad in zip(floating, found, strict=True)
            if grad is not None
        }
        return [by_name.get(leaf.name) for leaf in self.leaves]


class WholeValues:
    """Computes values of the global batch in a step, each once.

    Args:
        dependence: analysis of the step's tensors.
    """

    def __init__(self, dependence: BatchDependence) -> None:
        self._dependence = dependence
        self._made: dict[tuple[int, str], Whole] = {}

    def of(
        self, value: tf.Tensor, share: tf.Tensor, collectives: Collectives
    ) -> Whole | None:
        """The value for the global batch.

        Args:
            value: COUPLED or LINEAR tensor of the graph that is being traced.
            share: fraction of all ranks' samples that this rank has.
            collectives: collectives of the strategy.

        Returns:
            The value, or None if an op that computes it cannot be copied.
        """
        key = id(value.graph), value.name
        if key not in self._made:
            region = _Region(value, self._dependence)
            if not region.can_be_copied():
                return None
            self._made[key] = region.whole(share, collectives)
        return self._made[key]


class _Region:
    """The ops between the reductions over the batch and a value.

    Args:
        value: see `WholeValues.of`.
        dependence: analysis of the step's tensors.
    """

    def __init__(self, value: tf.Tensor, dependence: BatchDependence) -> None:
        self._target = value
        self._dependence = dependence
        self._ops: dict[str, tf.Operation] = {}  # are copied
        self._cuts: dict[str, tf.Tensor] = {}  # are reduced over the ranks
        self._leaves: dict[str, tf.Tensor] = {}  # are used unchanged
        self._levels: dict[str, int] = {}
        self._whole: dict[str, tf.Tensor] = {}
        self._collect()

    def _collect(self) -> None:
        pending = [self._target]
        seen = set()
        while pending:
            tensor = pending.pop()
            if tensor.name in seen:
                continue
            seen.add(tensor.name)
            kind = self._dependence.of(tensor)
            size = kind.name == STATIC and tensor.shape.rank == 0
            if kind.over_ranks or size:
                self._cuts[tensor.name] = tensor
            if kind.name == COUPLED or (
                kind.name in (COUNT, LINEAR) and not kind.over_ranks
            ):
                self._ops[tensor.op.name] = tensor.op
                pending += tensor.op.inputs
            else:
                self._leaves[tensor.name] = tensor

    def can_be_copied(self) -> bool:
        """Whether all ops are pure functions, without custom gradients."""
        here = tf.compat.v1.get_default_graph()
        return self._target.graph is here and not any(
            op.op_def.is_stateful or internals.OWN_GRADIENT in op.node_def.attr
            for op in self._ops.values()
        )

    def whole(self, share: tf.Tensor, collectives: Collectives) -> Whole:
        """Exchanges reductions and copies ops, level by level."""
        level = self._level_of(self._target)
        last = max(self._levels.values(), default=0)
        has_rows = self._dependence.of(self._target).axis is not None
        for each in range(1, last + 1):
            cuts = [
                cut
                for name, cut in self._cuts.items()
                if self._levels[name] == each
            ]
            # If rows depend on a reduction, its gradient differs between
            # ranks. If only the final value does, the gradient is equal.
            inner = each < level or has_rows
            self._exchange(cuts, inner, share, collectives)
        (value,) = self._copies([self._target])
        return Whole(value, list(self._leaves.values()), has_rows)

    def _level_of(self, value: tf.Tensor) -> int:
        """Number of successive exchanges that a tensor depends on."""
        levels: dict[str, int] = {}
        order = [
            op for op in value.graph.get_operations() if op.name in self._ops
        ]
        for op in order:
            below = [self._level_below(each, levels) for each in op.inputs]
            for output in op.outputs:
                levels[output.name] = max([0, *below])
                if output.name in self._cuts:
                    levels[output.name] += 1
                    self._levels[output.name] = levels[output.name]
        for name in self._cuts:
            self._levels.setdefault(name, 1)
        return self._levels.get(value.name, levels.get(value.name, 1))

    def _level_below(self, value: tf.Tensor, levels: dict[str, int]) -> int:
        own = value.name in self._cuts
        return levels.get(value.name, 1 if own else 0)

    def _exchange(
        self,
        cuts: Sequence[tf.Tensor],
        inner: bool,
        share: tf.Tensor,
        collectives: Collectives,
    ) -> None:
        """Reduces tensors over the ranks, in one exchange per reduction."""
        local = self._copies(cuts)
        by_reduction: dict[str, list[int]] = {}
        for i, cut in enumerate(cuts):
            how = self._dependence.of(cut).over_ranks or SUM
            by_reduction.setdefault(how, []).append(i)
        for how, places in by_reduction.items():
            exchange = _Reduction(how, inner, share, collectives)
            reduced = exchange([local[i] for i in places])
            for i, total in zip(places, reduced, strict=True):
                total.set_shape(local[i].shape)
                self._whole[cuts[i].name] = total

    def _copies(self, wanted: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Copies of tensors, computed from values of the global batch."""
        known = {**self._leaves, **self._whole}
        missing = [t for t in wanted if t.name not in known]
        if not missing:
            return [known[t.name] for t in wanted]
        names: set[str] = set()
        used: dict[str, tf.Tensor] = {}
        pending = [t.op for t in missing]
        while pending:
            op = pending.pop()
            if op.name in names:
                continue
            names.add(op.name)
            for each in op.inputs:
                if each.name in known:
                    used[each.name] = known[each.name]
                else:
                    pending.append(each.op)
        copies = _import(self._target.graph, names, used, missing)
        made = dict(zip((t.name for t in missing), copies, strict=True))
        return [
            made[t.name] if t.name in made else known[t.name] for t in wanted
        ]


def _import(
    graph: tf.Graph,
    names: set[str],
    inputs: dict[str, tf.Tensor],
    wanted: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Copies ops within a graph.

    Args:
        graph: the graph that is being traced.
        names: names of the ops.
        inputs: replacements of the ops' inputs, by the names of the inputs.
        wanted: tensors whose copies are returned.
    """
    whole = graph.as_graph_def()
    # The function library is left out. The graph has these functions, and
    # TensorFlow would replace and then delete functions of the same names.
    part = tf.compat.v1.GraphDef(versions=whole.versions)
    for node in whole.node:
        if node.name in names:
            copied = part.node.add()
            copied.CopyFrom(node)
            data = [name for name in node.input if not name.startswith("^")]
            del copied.input[:]
            copied.input.extend(data)
            copied.attr.pop(internals.COLOCATION, None)
    made = tf.graph_util.import_graph_def(
        part,
        input_map=inputs,
        return_elements=[tensor.name for tensor in wanted],
        name="whole_batch",
    )
    for copied, original in zip(made, wanted, strict=True):
        copied.set_shape(original.shape)
    return list(made)


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """Reduces tensors over the ranks.

    Attributes:
        how: SUM, MEAN (weighted by samples) or an op type.
        inner: whether gradients by the results differ between the ranks, so
            that they are summed over the ranks.
        share: fraction of all ranks' samples that this rank has.
        collectives: collectives of the strategy.
    """

    how: str
    inner: bool
    share: tf.Tensor
    collectives: Collectives

    def __call__(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if self.how not in (SUM, MEAN):
            return [self._of_gathered(value) for value in values]

        @tf.custom_gradient
        def reduce(*tensors: tf.Tensor) -> WithGradient:
            weighted = self.how == MEAN
            parts = list(tensors)
            if weighted:
                ranks = self.collectives.group.world_size
                parts = [part / ranks for part in parts]
            totals = self.collectives.all_reduce(parts, _LABEL, weighted)
            return totals, lambda *upstream: self._backward(list(upstream))

        found = reduce(*values)
        return list(found) if isinstance(found, list | tuple) else [found]

    def _backward(self, upstream: list[tf.Tensor]) -> list[tf.Tensor]:
        if self.inner:
            upstream = self.collectives.all_reduce(upstream, f"{_LABEL}/grad")
            if self.how == MEAN:
                return [u * tf.cast(self.share, u.dtype) for u in upstream]
            return upstream
        if self.how == MEAN:
            return upstream
        return [
            tf.math.divide_no_nan(u, tf.cast(self.share, u.dtype))
            for u in upstream
        ]

    def _of_gathered(self, value: tf.Tensor) -> tf.Tensor:
        """Gathers the results of all ranks and reduces them by the same op."""
        again, rank = _REDUCE_AGAIN[self.how], self.collectives.group.rank

        @tf.custom_gradient
        def gather(own: tf.Tensor) -> WithGradient:
            rows = self.collectives.all_gather(
                _as_numbers(own)[tf.newaxis], _LABEL
            )

            def backward(upstream: tf.Tensor) -> tf.Tensor:
                if self.inner:
                    total = self.collectives.all_reduce(
                        [upstream], f"{_LABEL}/grad"
                    )[0]
                    return total[rank]
                share = tf.cast(self.share, upstream.dtype)
                return tf.math.divide_no_nan(upstream[rank], share)

            return rows, backward

        rows = gather(value)
        if value.dtype == tf.bool:
            rows = tf.cast(rows, tf.bool)
        rows.set_shape([None, *value.shape])
        result: tf.Tensor = again(rows, axis=0)
        return result


def _as_numbers(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.uint8) if value.dtype == tf.bool else value
