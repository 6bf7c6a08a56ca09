# SPDX-License-Identifier: Apache-2.0
"""Which keys have which rows of a table, of the buckets that a rank owns.

Rank r of W owns the buckets from `r * B // W` up to `(r + 1) * B // W`; the
key in slot s of bucket b has row `1 + s * B + b` of the whole table. So the
keys of all ranks, `[B, slots]`, lie in a checkpoint as parallel slices beside
the table, whatever its placement is.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.ops import init_ops
from tfdist_ext.ops import vocabulary_ops
from tfdist_ext.sharding import checkpoint_slices
from tfdist_ext.sharding import initial_rows
from tfdist_ext.tables.dynamic_vocabulary import DynamicVocabulary
from tfdist_ext.tables.shard_spec import ShardSpec

if TYPE_CHECKING:
    from tfdist_ext.collectives.collectives import Collectives

# In the order of `vocabulary_ops.export_keys`.
_ROWS = ("keys", "counts", "steps")
_CANDIDATES = tuple(f"candidate_{name}" for name in _ROWS)
_STEP = "step"
_COUNTS = ("rows", "candidates", "admitted", "evicted", "expired", "step")


class KeyShard(tf.Module):
    """The keys of a table whose vocabulary grows; saved with its variable.

    All ranks make one, and call its methods that exchange.

    Args:
        spec: what this rank holds of the table.
        config: the rules of the vocabulary.
        initializer: of Keras, of the table.
        collectives: of the strategy, None in one process.

    Raises:
        ValueError: if keys may lose their rows, and the initializer cannot
            make single rows again.
    """

    def __init__(
        self,
        spec: ShardSpec,
        config: DynamicVocabulary,
        initializer: Any,
        collectives: Collectives | None,
    ) -> None:
        super().__init__(name=f"keys_of_{_identifier(spec.table)}")
        self._spec = spec
        self.config = config
        self._collectives = collectives
        self._rank, self._world_size = 0, 1
        if collectives is not None:
            self._rank = collectives.group.rank
            self._world_size = collectives.group.world_size
            marks.set_collectives(self, collectives)
            marks.set_slicing(self, self._slice_in)
        self._initial: tuple[str, float, float] | None = None
        if config.takes_back:
            self._initial = initial_rows.describe_rows(initializer, spec)
        with tf.init_scope():
            self.handle = vocabulary_ops.vocabulary(
                spec.table, config, self._rank, self._world_size
            )
            self._seed = tf.constant(
                initial_rows.seed_of(initializer, spec.table), tf.int64
            )
            if collectives is not None:
                self._seed = collectives.initial_value(
                    self._seed, f"{spec.table}/seed of rows"
                )
        checkpoint_slices.save_by(self, self._saved, self._restore)
        self._traced: Any = None
        self._slots = _Slots()
        self._read_buckets = 0
        self._exported = _Exported()

    def begins_step(self) -> bool:
        """Whether a lookup that is traced now is the first of its graph."""
        graph = internals.current_graph()
        if graph is None:
            return True
        if self._traced is not None and self._traced() is graph:
            return False
        self._traced = weakref.ref(graph)
        return True

    def attach(self, variable: Any) -> None:
        """Says that this is of a table.

        Args:
            variable: of TensorFlow, this rank's part.
        """
        marks.set_keys(variable, self)
        strategy = getattr(variable, "distribute_strategy", None)
        if strategy is not None:
            for component in strategy.experimental_local_results(variable):
                marks.set_keys(component, self)
        self._restore_smaller(variable)

    def _restore_smaller(self, variable: Any) -> None:
        if self._collectives is None:
            checkpoint_slices.attach_whole(variable, self._spec.table)
        elif marks.shard_spec(variable) is None:
            marks.set_grows(variable)

    def adopt_slot(self, slot: Any, value: float) -> None:
        """Takes in what an optimizer keeps for the rows of the table.

        Args:
            slot: of TensorFlow, like the table or with a value per row.
            value: that it begins with.
        """
        self._slots.all.append((slot, value))
        self._restore_smaller(slot)

    def reset_slots(self) -> None:
        """Gives slots of rows with new keys the values they begin with.

        An optimizer calls it before it updates the table.
        """
        if self.config.takes_back:
            rows = vocabulary_ops.take_resets(self.handle)
            for slot, value in self._slots.all:
                self.reset(slot, rows, value)

    def reset(
        self, variable: Any, rows: tf.Tensor, value: float | None = None
    ) -> None:
        """Gives rows of the table, or of a slot, their initial values.

        Args:
            variable: of TensorFlow, this rank's part.
            rows: int64 `[r]` of the whole table.
            value: of a slot; None for the table's own.
        """
        strategy = getattr(variable, "distribute_strategy", None)
        if strategy is None:
            self._reset(variable, rows, value)
            return
        for component in strategy.experimental_local_results(variable):
            self._reset(component, rows, value)

    def _reset(
        self, variable: tf.Variable, rows: tf.Tensor, value: float | None
    ) -> None:
        spec = marks.shard_spec(variable) or self._spec
        per_row = variable.shape.rank == 1
        distribution, a, b = ("constant", value, 0.0)
        if value is None:
            assert self._initial is not None
            distribution, a, b = self._initial
        init_ops.reset_rows(
            variable,
            rows,
            rows=spec.rows,
            row_part=spec.cell[0] if spec.cell else 0,
            row_parts=spec.row_parts,
            local_rows=spec.local_rows,
            first_column=0 if per_row else spec.columns[0],
            local_dim=1 if per_row else spec.local_dim,
            seed=self._seed,
            distribution=distribution,
            a=a,
            b=b,
        )

    def counts(self) -> dict[str, int]:
        """Figures of all ranks' keys together; all ranks call.

        Returns:
            "rows" in use and "candidates"; keys "admitted", "evicted" and
            "expired" since the start; "step", how many were learned from.
        """
        mine = vocabulary_ops.vocabulary_counts(self.handle)
        totals = mine
        if self._collectives is not None:
            (totals,) = self._collectives.all_reduce(
                [mine], f"{self._spec.table}/counts"
            )
        found = dict(zip(_COUNTS, totals.numpy().tolist(), strict=False))
        found[_STEP] = int(mine[_COUNTS.index(_STEP)])
        return found

    def all_keys(self) -> dict[str, np.ndarray]:
        """The keys that have rows, on every rank; all ranks call.

        Returns:
            "keys" int64 `[n]`, or `[n, 2]` fingerprints, with "rows",
            "counts" and "steps" int64 `[n]`, by row.
        """
        keys, counts, steps = (
            array.numpy()
            for array in vocabulary_ops.export_keys(self.handle)[:3]
        )
        bucket, slot = np.nonzero(counts)
        first, _ = self.owned(self._buckets())
        rows = 1 + slot * self._buckets() + bucket + first
        at = (bucket, slot)
        mine = np.column_stack([rows, counts[at], steps[at], keys[at]])
        mine = mine.astype(np.int64)
        if self._collectives is not None:
            mine = self._collectives.all_gather(
                tf.constant(mine), f"{self._spec.table}/keys"
            ).numpy()
        mine = mine[np.argsort(mine[:, 0])]
        found = mine[:, 3:]
        return {
            "keys": found[:, 0] if found.shape[1] == 1 else found,
            "rows": mine[:, 0],
            "counts": mine[:, 1],
            "steps": mine[:, 2],
        }

    def gathered(self) -> dict[str, np.ndarray]:
        """What a file of Keras holds, on every rank; all ranks call."""
        found = {}
        arrays = self._export()
        for name in self._names():
            value = arrays[name]
            if self._collectives is not None:
                value = self._collectives.all_gather(
                    value, f"{self._spec.table}/{name}"
                )
            found[name] = value.numpy()
        return found

    def take(self, saved: Mapping[str, Any]) -> None:
        """Takes this rank's part of what `gathered` returned.

        Args:
            saved: arrays, or what can be sliced, by name.
        """
        self._read_buckets = saved[_STEP].shape[0]
        first, end = self.owned(self._read_buckets)
        # As in a checkpoint, a rank that owns nothing reads a bucket.
        first, end = min(first, self._read_buckets - 1), max(end, first + 1)
        self._restore(
            {
                name: tf.constant(np.asarray(each[first:end]), tf.int64)
                for name, each in saved.items()
            }
        )

    def copy(self) -> Any:
        """The keys of this rank, for `put_back`."""
        counts = vocabulary_ops.vocabulary_counts(self.handle)
        arrays = vocabulary_ops.export_keys(self.handle)
        return int(counts[6]), counts[5], arrays

    def put_back(self, copied: Any) -> None:
        """Makes the keys of this rank what they were.

        Args:
            copied: of `copy`.
        """
        vocabulary_ops.import_keys(self.handle, *copied)

    def _buckets(self) -> int:
        """Buckets of all ranks: those of the checkpoint that was restored."""
        return int(vocabulary_ops.vocabulary_counts(self.handle)[6])

    def owned(self, buckets: int) -> tuple[int, int]:
        """The first bucket of this rank, and the one after the last.

        Args:
            buckets: of all ranks.
        """
        first = self._rank * buckets // self._world_size
        return first, (self._rank + 1) * buckets // self._world_size

    def _names(self) -> tuple[str, ...]:
        if self.config.min_count > 1:
            return (*_ROWS, *_CANDIDATES, _STEP)
        return (*_ROWS, _STEP)

    def _export(self) -> dict[str, tf.Tensor]:
        arrays = vocabulary_ops.export_keys(self.handle)
        found = dict(zip((*_ROWS, *_CANDIDATES), arrays, strict=True))
        step = vocabulary_ops.vocabulary_counts(self.handle)[5]
        found[_STEP] = tf.fill([tf.shape(arrays[1])[0]], step)
        return found

    def _piece(self, name: str) -> tf.Tensor | None:
        """One of what is exported, at once for all of them."""
        pieces = self._exported.pieces
        if name not in pieces:
            found = self._export()
            pieces.update({each: found[each] for each in self._names()})
        value = pieces.pop(name)
        return value if value.shape[0] else None  # a rank may own no bucket

    def shapes(self, buckets: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what all ranks save together, by name."""
        slots = -(-self.config.capacity // buckets)
        words = 2 if self.config.key_dtype == "string" else 1
        return {
            name: (buckets,)
            if name == _STEP
            else (buckets, slots, words)
            if name.endswith("keys")
            else (buckets, slots)
            for name in self._names()
        }

    def _slice_in(self, shape: tuple[int, ...]) -> str:
        """The slice to be read of a file, maybe of a smaller vocabulary."""
        self._read_buckets = shape[0]
        return self.slice_of(shape)

    def slice_of(self, shape: tuple[int, ...]) -> str:
        """This rank's part of an array of all ranks, as TensorFlow writes it.

        A rank that owns nothing reads a bucket that it does not use.
        """
        first, end = self.owned(shape[0])
        size = max(end - first, 1)
        first = min(first, shape[0] - 1)
        parts = [f"{first},{size}", *(f"0,{each}" for each in shape[1:])]
        return f"{' '.join(map(str, shape))} {':'.join(parts)}"

    def _saved(self) -> dict[str, Any]:
        if self._collectives is None:
            found = self._export()
            return {name: found[name] for name in self._names()}
        return {
            name: {
                (spec := self.slice_of(shape)): internals.SaveSpec(
                    tensor=functools.partial(self._piece, name),
                    slice_spec=spec,
                    name=name,
                    dtype=tf.int64,
                    device="CPU:0",
                )
            }
            for name, shape in self.shapes(self._buckets()).items()
        }

    def _restore(self, restored: dict[str, Any]) -> None:
        found = {}
        for name, value in restored.items():
            if isinstance(value, dict):
                (value,) = value.values()
            found[name] = value
        # A slice does not tell of how many.
        buckets = self._read_buckets or found[_STEP].shape[0]
        first, end = self.owned(buckets)
        arrays = [found[name][: end - first] for name in _ROWS]
        empty = [tf.zeros([end - first, 0], tf.int64)] * 3
        if _CANDIDATES[0] in found:
            empty = [found[name][: end - first] for name in _CANDIDATES]
        vocabulary_ops.import_keys(
            self.handle,
            buckets,
            tf.reduce_max(found[_STEP]),
            [*arrays, *empty],
        )


@dataclasses.dataclass
class _Exported:
    """What is being saved, which a module would take for a part of itself."""

    pieces: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Slots:
    """Slots with their initial values, which a module would save again."""

    all: list[tuple[Any, float]] = dataclasses.field(default_factory=list)


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
