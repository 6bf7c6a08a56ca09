# SPDX-License-Identifier: Apache-2.0
"""Gradients of tables: duplicate and repeated rows, clipping, updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm.exchanges import sum_over_ranks
from tfdist_ext.marks import shard_spec
from tfdist_ext.ops import optimizer_ops
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Scalar
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable


def without_duplicates(grad: Gradient) -> TensorOrSlices:
    """Sums the values of duplicate rows, so that only sums are squared.

    A tape concatenates the gradients of a layer that was called twice.

    Args:
        grad: IndexedSlices, or a value that can be converted to a tensor.

    Returns:
        IndexedSlices with unique indices, or a tensor. The `dense_shape` is
        the same tensor as that of `grad`, because it carries the mark of a
        shard's gradient.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return tf.convert_to_tensor(grad)
    if grad.values.shape.rank == 2 and grad.values.dtype == tf.float32:
        rows, values = optimizer_ops.sum_duplicate_rows(
            tf.cast(grad.indices, tf.int64), grad.values
        )
        rows = tf.cast(rows, grad.indices.dtype)
    else:
        rows, positions = tf.unique(grad.indices)
        values = tf.math.unsorted_segment_sum(
            grad.values, positions, tf.size(rows)
        )
    marks.set_row_source(rows, grad.indices)
    return tf.IndexedSlices(values, rows, grad.dense_shape)


def is_of_one_lookup(grad: tf.IndexedSlices) -> bool:
    """Whether a gradient is that of one lookup, whose rows are unique."""
    return bool(
        tf.is_symbolic_tensor(grad.indices)
        and grad.indices.op.type == "Tfdist>LookupGrad"
    )


GradsAndVars = Sequence[tuple[Gradient, Variable]]


def clip_gradients(
    grads_and_vars: GradsAndVars,
    *,
    clipnorm: float | None = None,
    global_clipnorm: float | None = None,
    clipvalue: float | None = None,
) -> list[tuple[Gradient, Variable]]:
    """Clips gradients by the first option that is set.

    Args:
        grads_and_vars: pairs of a gradient (tensor, IndexedSlices or None),
            summed over the ranks, and its variable.
        clipnorm: the largest norm of each gradient.
        global_clipnorm: the largest norm of all gradients as one vector.
        clipvalue: the largest absolute value of an element.

    Returns:
        The pairs with clipped gradients. IndexedSlices have the same
        `dense_shape`, and unique rows.
    """
    pairs = list(grads_and_vars)
    if not (clipnorm or global_clipnorm or clipvalue):
        return pairs
    kept = [i for i, (grad, _) in enumerate(pairs) if grad is not None]
    grads = [without_duplicates(pairs[i][0]) for i in kept]
    if clipnorm or global_clipnorm:
        specs = [shard_spec(pairs[i][1]) for i in kept]
        norms = square_norms(grads, specs)
        if clipnorm:
            factors = [
                clipnorm / tf.maximum(tf.sqrt(n), clipnorm) for n in norms
            ]
        else:
            factors = [_global_factor(norms, global_clipnorm)] * len(grads)
        clipped = [_scale(g, f) for g, f in zip(grads, factors, strict=True)]
    else:
        clipped = [_clip_values(grad, clipvalue) for grad in grads]
    for i, grad in zip(kept, clipped, strict=True):
        pairs[i] = (grad, pairs[i][1])
    return pairs


def _global_factor(
    square_norms: Sequence[tf.Tensor], limit: Scalar
) -> tf.Tensor:
    norm = tf.sqrt(tf.add_n(square_norms))
    factor = limit * tf.minimum(1 / norm, 1 / limit)
    # NaN if the norm is not finite, as in Keras. Otherwise 0 * inf hides it.
    return factor + (norm - norm)


def _scale(grad: Gradient, factor: tf.Tensor) -> TensorOrSlices:
    return _map(lambda values: values * tf.cast(factor, values.dtype), grad)


def _clip_values(grad: Gradient, limit: Scalar) -> TensorOrSlices:
    return _map(lambda v: tf.clip_by_value(v, -limit, limit), grad)


def _map(
    fn: Callable[[tf.Tensor], tf.Tensor], grad: Gradient
) -> TensorOrSlices:
    if not isinstance(grad, tf.IndexedSlices):
        return fn(grad)
    # The same `dense_shape` tensor, which carries the mark of the gradient.
    return tf.IndexedSlices(fn(grad.values), grad.indices, grad.dense_shape)


def _square_norm(grad: Gradient) -> tf.Tensor:
    """Returns the sum of squares of this rank's part."""
    values = tf.cast(getattr(grad, "values", grad), tf.float32)
    return tf.reduce_sum(tf.square(values))


def square_norms(
    grads: Sequence[Gradient], specs: Sequence[ShardSpec | None]
) -> list[tf.Tensor]:
    """Returns sums of squares of entire gradients, bitwise equal on all ranks.

    Args:
        grads: tensors, or IndexedSlices with unique rows.
        specs: the spec of the shard of each gradient, None for other variables.
    """
    local = [_square_norm(grad) for grad in grads]
    if not any(spec is not None and spec.partitioned for spec in specs):
        return local
    # Dense gradients are equal on all ranks, but their sums of squares are not:
    # they depend on the number of threads. The mean over the ranks is bitwise
    # equal, and so are dense weights. The 1 counts the ranks.
    totals = tf.unstack(
        sum_over_ranks(tf.stack([tf.ones([]), *local]), "gradient norms"),
        num=1 + len(local),
    )
    return [
        total if spec is not None else total / totals[0]
        for total, spec in zip(totals[1:], specs, strict=True)
    ]


def sum_repeated_rows(
    original: Original[T],
    optimizer: Optimizer,
    grads: Sequence[Gradient],
    *args: Any,
    **kw: Any,
) -> T:
    """Sums the gradients of several calls for a row, as several ranks do.

    A tape concatenates them, and Keras 3 would square each of them.
    """
    return original(optimizer, list(map(_summed, grads)), *args, **kw)


def _summed(grad: Gradient) -> TensorOrSlices:
    if not (isinstance(grad, tf.IndexedSlices) and marks.is_unique(grad)):
        return grad
    if marks.gradient_spec(grad) is not None:  # a shard's rows are summed later
        return grad
    if tf.is_symbolic_tensor(grad.indices):
        # The gradient of a single call has unique rows.
        calls = grad.indices.op.type.startswith("Concat")
        return without_duplicates(grad) if calls else grad
    return without_duplicates(grad)


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """An update of rows of a table.

    Attributes:
        rule: how a row is updated.
        table: float32 or bfloat16 variable `[num_rows, dim]`.
        slots: handles of its slots, in the order of the rule. A slot of a
            strategy has no handle after the update, so it is taken before.
        rows: int64 `[n]`.
        grads: float32 `[n, dim]`.
        seed: int64 scalar for stochastic rounding, or None.
    """

    rule: optimizer_ops.RowRule
    table: tf.Variable
    slots: Sequence[tf.Tensor]
    rows: tf.Tensor
    grads: tf.Tensor
    seed: tf.Tensor | None

    def apply(self) -> None:
        """Updates the rows."""
        optimizer_ops.update_rows(
            self.rule,
            self.table,
            self.slots,
            self.rows,
            self.grads,
            rounding_seed=self.seed,
        )

    def lookup_gradient(self) -> tf.Operation | None:
        """Returns the op that computes rows and grads for this update only.

        None if there is no such op, if others use its results too, or if it
        runs on a GPU.
        """
        slices = tf.IndexedSlices(self.grads, self.rows)
        if not is_of_one_lookup(slices) or self.grads.op is not self.rows.op:
            return None
        op = self.rows.op
        used = self.grads.consumers() or self.rows.consumers()
        on_gpu = "GPU" in (self.table.device or "")
        return (
            None if used or on_gpu or self.rule.options.get("all_rows") else op
        )


class CollectedUpdates:
    """Updates of tables, of which those of a lookup are applied by one op.

    This op computes the gradients of rows as well, so that they are not written
    to memory. Results are the same, bit for bit.
    """

    def __init__(self) -> None:
        self._groups: dict[Any, list[RowUpdate]] = {}

    def add(self, update: RowUpdate, optimizer: Optimizer) -> None:
        """Adds an update, or applies it if its gradient is of no lookup."""
        op = update.lookup_gradient()
        if op is None:
            update.apply()
            return
        key = op.name, id(op.graph), id(optimizer), update.seed is None
        self._groups.setdefault(key, []).append(update)

    def apply(self) -> None:
        """Applies the updates that were added."""
        for updates in self._groups.values():
            op = updates[0].grads.op
            by_table = {update.rows.value_index: update for update in updates}
            if len(by_table) == len(updates) == len(op.outputs) // 2:
                _update_tables(op, [by_table[i] for i in sorted(by_table)])
            else:
                for update in updates:
                    update.apply()


def _update_tables(op: tf.Operation, updates: Sequence[RowUpdate]) -> None:
    """Updates all tables of a lookup, whose gradients `op` would compute."""
    optimizer_ops.update_looked_up_rows(
        updates[0].rule,
        [update.table for update in updates],
        [update.slots for update in updates],
        *op.inputs,
        feature_tables=op.get_attr("feature_tables"),
        rounding_seeds=[u.seed for u in updates if u.seed is not None],
    )
