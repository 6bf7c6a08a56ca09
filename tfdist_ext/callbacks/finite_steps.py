# SPDX-License-Identifier: Apache-2.0
"""Steps that update nothing unless all of their numbers are finite.

What is not finite on any rank is known to all of them before the update, by
one exchange of a number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.callbacks.update_watch import Pairs
from tfdist_ext.callbacks.update_watch import UpdateWatch
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.collectives.sums import sum_over_ranks
from tfdist_ext.keras_internals import value_of
from tfdist_ext.sharding import kernel_reads
from tfdist_ext.tables import rotated_mod

# What is counted of the loss and of every variable, in this order: numbers of a
# gradient, rows of one, rows after the update; each with the first row's number
# plus one, 0 for none.
_COLUMNS = 4
_KINDS = ("gradient", "rows")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Numbers of one kind that are not finite.

    Attributes:
        kind: "loss", "gradient", or "rows" of a table after the update.
        rank: where they were found.
        variable: whose they are, empty of the loss.
        count: of the rows of a table, else of the numbers.
        row: the first of them in a table, None of what has no rows.
        shared: whether the gradient is a sum over the ranks already.
    """

    kind: str
    rank: int
    variable: str
    count: int
    row: int | None
    shared: bool

    def __str__(self) -> str:
        if self.kind == "loss":
            return f"the loss of rank {self.rank}"
        place = (
            f" (row {self.row} is the first)" if self.row is not None else ""
        )
        unit = "numbers" if self.row is None else "rows"
        what = "the gradient of " if self.kind == "gradient" else ""
        return (
            f"{self.count} {unit} of {what}{self.variable}{place} on rank "
            f"{self.rank}"
        )


class FiniteSteps:
    """Watches the steps of a model, and skips updates that would spoil it.

    Args:
        watch: of the model.
        collectives: of its strategy; None in one process.
        keep: is given this rank's part of a batch that is not finite: names,
            then as many arrays.
    """

    def __init__(
        self,
        watch: UpdateWatch,
        collectives: Collectives | None,
        keep: Callable[..., None],
    ) -> None:
        self._collectives = collectives
        self._keep = keep
        self._variables: list[Any] = []
        self._shared: list[bool] = []
        self._state: Any = None
        self._any: Any = None
        watch.add(self._around)

    def anything(self) -> bool:
        """Whether any rank found something since the last `take`."""
        return self._state is not None and bool(self._any.numpy())

    def take(self) -> list[Finding]:
        """What all ranks have found; all must ask for it."""
        mine = self._state.numpy()
        self._state.assign(tf.zeros_like(mine))
        self._any.assign(False)
        for place, found in enumerate(mine[1:]):
            found[1::2] = [self._id_of(place, row) for row in found[1::2]]
        everyone = tf.constant(mine[np.newaxis])
        if self._collectives is not None:
            everyone = self._collectives.all_gather(everyone, "not finite")
        findings = []
        for rank, (loss, *variables) in enumerate(everyone.numpy()):
            if loss[0]:
                findings += [Finding("loss", rank, "", 1, None, False)]
            for place, found in enumerate(variables):
                findings += self._of(rank, place, found)
        return findings

    def _of(self, rank: int, place: int, found: Any) -> list[Finding]:
        variable = self._variables[place]
        spec = marks.shard_spec(variable)
        name = f"'{getattr(variable, 'path', variable.name)}'"
        name = name if spec is None else f"table '{spec.table}'"
        return [
            Finding(
                kind,
                rank,
                name,
                int(count),
                int(row) - 1 if row else None,
                self._shared[place],
            )
            for kind, count, row in zip(
                _KINDS, found[::2], found[1::2], strict=True
            )
            if count
        ]

    def _id_of(self, place: int, row: int) -> int:
        """The id of a local row, either as one more than it is."""
        spec = marks.shard_spec(self._variables[place])
        if not row or spec is None or spec.cell is None:
            return row
        ids = rotated_mod.ids_of_part(
            spec.cell[0], spec.row_parts, spec.rows, row - 1, row
        )
        return int(ids[0]) + 1

    def _around(
        self, watch: UpdateWatch, pairs: Pairs, update: Callable[[], Any]
    ) -> None:
        self._prepare([variable for _, variable in pairs])
        own = [_own_part(gradient) for gradient, _ in pairs]
        self._shared = [part is None for part in own]
        loss = tf.zeros([]) if watch.loss is None else watch.loss
        before = [_of_numbers(loss)]
        for part, (gradient, _) in zip(own, pairs, strict=True):
            before.append(_of_gradient(gradient if part is None else part))
        fine = self._agree(before, "not finite/gradients")
        _only_if(fine, update)
        after = [_NOTHING, *(_of_rows(g, v) for g, v in pairs)]
        fine = tf.logical_and(fine, self._agree(after, "not finite/rows"))
        new = tf.concat([tf.stack(before), tf.stack(after)], axis=1)
        self._state.assign(tf.where(self._state > 0, self._state, new))
        self._any.assign(tf.logical_or(self._any, tf.logical_not(fine)))
        batch = dict(_named("batch", watch.data))
        tf.cond(fine, lambda: True, lambda: self._kept(batch))

    def _kept(self, batch: dict[str, tf.Tensor]) -> bool:
        keep = functools.partial(self._keep, list(batch))
        tf.numpy_function(keep, list(batch.values()), [])
        return True

    def _prepare(self, variables: list[Any]) -> None:
        if self._state is not None:
            return
        self._variables = variables
        options = {
            "trainable": False,
            "synchronization": tf.VariableSynchronization.NONE,
        }
        with tf.init_scope():
            zeros = np.zeros([len(variables) + 1, _COLUMNS], np.int64)
            self._state = tf.Variable(zeros, **options)
            self._any = tf.Variable(False, **options)

    def _agree(self, counts: list[tf.Tensor], label: str) -> tf.Tensor:
        """Whether nothing was counted on any rank."""
        mine = tf.reduce_sum(tf.stack(counts)) > 0
        return sum_over_ranks(tf.cast(mine, tf.float32), label) == 0.0


def _named(name: str, data: Any) -> Iterator[tuple[str, tf.Tensor]]:
    """The tensors of a batch, named by their places in it."""
    if tf.is_tensor(data) and not isinstance(
        data, tf.__internal__.CompositeTensor
    ):
        yield name, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _named(f"{name}/{key}", value)
    elif isinstance(data, list | tuple):
        for place, value in enumerate(data):
            yield from _named(f"{name}/{place}", value)
    elif isinstance(data, tf.__internal__.CompositeTensor):
        parts = tf.nest.flatten(data, expand_composites=True)
        yield from _named(name, parts)


_NOTHING = np.zeros([2], np.int64)


def _of_numbers(values: Any) -> tf.Tensor:
    """int64 `[2]`: how many are not finite, and no row."""
    wrong = tf.logical_not(tf.math.is_finite(values))
    return tf.stack([tf.math.count_nonzero(wrong), 0])


def _of_table(rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """int64 `[2]`: how many rows are not finite, and the first plus one."""
    width = tf.range(1, tf.rank(values))
    fine = tf.reduce_all(tf.math.is_finite(values), axis=width)
    wrong = tf.boolean_mask(tf.cast(rows, tf.int64), tf.logical_not(fine))
    # The least of none is the largest number there is.
    first = tf.where(tf.size(wrong) > 0, tf.reduce_min(wrong) + 1, 0)
    return tf.stack([tf.size(wrong, tf.int64), first])


def _own_part(gradient: Any) -> Any:
    """What this rank has given to a gradient; None if only the sum is known."""
    if marks.gradient_spec(gradient) is not None:
        return None
    values = getattr(gradient, "values", gradient)
    if marks.is_reduced(values):
        return marks.own_part(values)
    return gradient


def _of_gradient(gradient: Any) -> tf.Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        return _of_table(gradient.indices, gradient.values)
    return _of_numbers(gradient)


def _of_rows(gradient: Any, variable: Any) -> tf.Tensor:
    """Those of a table's rows that an update has touched."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.constant(_NOTHING)
    with kernel_reads.allowed():
        values = tf.gather(value_of(variable), gradient.indices)
    return _of_table(gradient.indices, values)


def _only_if(fine: tf.Tensor, update: Callable[[], Any]) -> None:
    """Runs an update in a branch, as loss scales of Keras do.

    A branch of a replica cannot call for all replicas, which an update does:
    the branch is that of all replicas.
    """

    def updated() -> bool:
        update()
        return True

    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(fine, updated, lambda: True)
        return

    def across(strategy: tf.distribute.Strategy) -> None:
        def updated_everywhere() -> bool:
            strategy.extended.call_for_each_replica(update)
            return True

        tf.cond(fine, updated_everywhere, lambda: True)

    tf.distribute.get_replica_context().merge_call(across)
