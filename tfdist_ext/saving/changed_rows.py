# SPDX-License-Identifier: Apache-2.0
"""Delta checkpoints: the rows that a full checkpoint does not have."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.embedding.sharded_variable import fingerprints
from tfdist_ext.keras_internals import value_of
from tfdist_ext.saving.checkpoint_files import Opened
from tfdist_ext.tables import placement


def variable_of(trackable: Any) -> Any:
    """TensorFlow's variable of one of Keras's; anything else as it is."""
    if isinstance(trackable, tf.distribute.DistributedValues):
        return trackable
    return value_of(trackable)


def collectives_of(objects: Iterable[Any]) -> Collectives | None:
    """The ranks that share any of the objects, None if none is shared."""
    for found in map(variable_of, objects):
        if isinstance(found, tf.distribute.DistributedValues):
            strategy = found._distribute_strategy
            collectives = getattr(strategy, "collectives", None)
        else:
            collectives = marks.collectives_of_shard(found)
        if isinstance(collectives, Collectives):
            return collectives
    return None


def is_shard(trackable: Any) -> bool:
    """Whether it is a part of a partitioned table or slot."""
    found = variable_of(trackable)
    if isinstance(found, tf.distribute.DistributedValues):
        return False
    return marks.collectives_of_shard(found) is not None


def slicing(trackable: Any) -> Any:
    """How what grows is read of a smaller checkpoint, None of all else."""
    found = variable_of(trackable)
    if isinstance(found, tf.distribute.DistributedValues):
        return None
    return marks.slicing(found)


def is_sum(trackable: Any) -> bool:
    """Whether reading it is an exchange, as of a metric of tf_keras."""
    return isinstance(variable_of(trackable), internals.SyncOnReadVariable)


def is_of_one_rank(trackable: Any) -> bool:
    """Whether every rank has a state of its own, as a dataset's place."""
    return isinstance(trackable, tf.data.Iterator)


def name_of_rank(name: str, rank: int) -> str:
    """Name under which a rank saves such a state."""
    return f"{name}/rank_{rank}" if rank else name


_IDS = re.compile(r"(.*)/rows_of_(\d+)/ids")


def delta_entries(
    key: str,
    rank: int,
    ids: np.ndarray,
    columns: tuple[int, int] | None,
    values: tf.Tensor,
) -> list[tuple[str, str, tf.Tensor]]:
    """What a rank writes of a tensor: names, slices, values.

    Args:
        key: name of the tensor.
        rank: that writes.
        ids: of the rows, int64 `[n]`.
        columns: the first, and the one after the last; None for all.
        values: `[n, ...]`.
    """
    name = f"{key}/rows_of_{rank}"
    return [
        (f"{name}/ids", "", tf.constant(ids, tf.int64)),
        (f"{name}/columns", "", tf.constant(columns or (0, -1), tf.int64)),
        (f"{name}/values", "", values),
    ]


def first_changed_row(spec: str) -> int:
    """The first row of a slice as TensorFlow writes it, "" for all."""
    return _offsets(spec)[0]


class DeltaRows:
    """The rows of a checkpoint that has only those that have changed.

    Args:
        path: of the checkpoint.

    Attributes:
        keys: tensors of which it has rows; all others it has whole.

    Raises:
        tf.errors.DataLossError: it cannot be read, here or later.
    """

    def __init__(self, path: str) -> None:
        self._opened = Opened(path)
        self._ranks: dict[str, list[int]] = {}
        for name in self._opened.names:
            if match := _IDS.fullmatch(name):
                self._ranks.setdefault(match[1], []).append(int(match[2]))
        self.keys = frozenset(self._ranks)

    def put_into(self, key: str, spec: str, value: tf.Tensor) -> tf.Tensor:
        """Replaces rows of what was read of the full checkpoint.

        Args:
            key: name of the tensor.
            spec: which slice of it the value is, "" for all.
            value: as it was.
        """
        rows, (first, first_column) = value.numpy().copy(), _offsets(spec)
        for rank in self._ranks[key]:
            name = f"{key}/rows_of_{rank}"
            ids = self._opened.tensor(f"{name}/ids") - first
            here = (ids >= 0) & (ids < len(rows))
            if not here.any():
                continue
            values = self._opened.tensor(f"{name}/values")[here]
            if rows.ndim != 2:
                rows[ids[here]] = values
                continue
            start, end = self._opened.tensor(f"{name}/columns")
            end = end if end >= 0 else values.shape[1]
            left = max(start, first_column)
            right = min(end, first_column + rows.shape[1])
            if left < right:
                target = slice(left - first_column, right - first_column)
                source = slice(left - start, right - start)
                rows[ids[here], target] = values[:, source]
        return tf.constant(rows)


def _offsets(spec: str) -> tuple[int, int]:
    """The first row and the first column of a slice."""
    starts = [0, 0]
    if spec:
        for place, part in enumerate(spec.split()[-1].split(":")[:2]):
            starts[place] = 0 if part == "-" else int(part.partition(",")[0])
    return starts[0], starts[1]


# Name, slice of the whole tensor ("" for all of it), values.
Entry = tuple[str, str, tf.Tensor]
Marks = dict[str, np.ndarray]
# Of an object's bytes, above which all of them are written.
_MOST = 0.5


@dataclasses.dataclass
class Rows:
    """What this rank has of a tensor.

    Attributes:
        key: its name.
        values: `[n, ...]`, more rows may follow.
        changed: numbers of those that have changed, int64 `[m]`.
        ids: their numbers in the whole tensor, int64 `[m]`.
        columns: of the whole tensor, the first and the one after the last;
            None for all.
        rows: n; 0 if another rank writes what this one has, too.
        entry: as it is written whole, None of a part of a table.
    """

    key: str
    values: tf.Tensor
    changed: np.ndarray
    ids: np.ndarray
    columns: tuple[int, int] | None
    rows: int
    entry: Entry | None = None

    @property
    def object(self) -> str:
        """The name of what the tensor belongs to."""
        return object_of(self.key)

    def bytes(self) -> np.ndarray:
        """Sizes of the rows that have changed, and of all; int64 `[2]`."""
        size = self.values.dtype.size * int(np.prod(self.values.shape[1:]))
        return np.array([len(self.changed), self.rows], np.int64) * size

    def entries(self, rank: int) -> list[Entry]:
        """The rows that have changed, as a rank writes them."""
        if not self.rows:
            return []
        with tf.device("CPU:0"):
            rows = tf.gather(self.values, self.changed)
        return delta_entries(self.key, rank, self.ids, self.columns, rows)


class ChangedRows:
    """What has changed since a full checkpoint, as one is made; or all.

    Args:
        since: fingerprints at the full checkpoint; None to make one.

    Attributes:
        now: fingerprints of this one.
        share: of all bytes that have changed, by what this rank knows.
    """

    def __init__(self, since: Marks | None) -> None:
        self._since = since
        self.now: Marks = {}
        self.share = 1.0

    @property
    def since_full(self) -> bool:
        """Whether only what has changed is to be written."""
        return self._since is not None

    def note(
        self, tables: Iterable[Any], entries: Iterable[Entry]
    ) -> list[Rows]:
        """Notes what rows there are, tells which have changed.

        Args:
            tables: parts of tables, as a saver has them.
            entries: all else.

        Returns:
            What can be written by row.
        """
        found = map(self._of_table, tables)
        others = map(self._of_entry, entries)
        return [*found, *(rows for rows in others if rows is not None)]

    def objects_by_row(
        self,
        rows: Sequence[Rows],
        shared: Iterable[str],
        collectives: Collectives | None,
    ) -> set[str]:
        """Names of objects whose changed rows are written, alike on all ranks.

        Args:
            rows: of this rank.
            shared: names of those that all ranks have, with parts or none; of
                the others, rank 0 decides.
            collectives: of the strategy, None in one process.
        """
        sums = {name: np.zeros([2], np.int64) for name in sorted(shared)}
        names = list(sums)
        for each in rows:
            before = sums.get(each.object, np.zeros([2], np.int64))
            sums[each.object] = before + each.bytes()
        if collectives is not None and names:
            mine = tf.constant(np.stack([sums[name] for name in names]))
            (total,) = collectives.all_reduce([mine], "checkpoint/changed")
            sums.update(zip(names, total.numpy(), strict=True))
        changed, all_ = sum(sums.values(), np.zeros([2], np.int64))
        self.share = changed / max(all_, 1)
        return {
            name
            for name, (changed, all_) in sums.items()
            if changed <= _MOST * all_
        }

    def _changed(self, key: str, values: tf.Tensor) -> np.ndarray:
        self.now[key] = now = fingerprints(values)
        before = None if self._since is None else self._since.get(key)
        if before is None or len(before) != len(now):
            return np.arange(len(now))
        return np.flatnonzero(now != before)

    def _of_table(self, tensor: Any) -> Rows:
        variable = variable_of(trackable_of(tensor))
        spec = marks.shard_spec(variable)
        assert spec is not None
        with sharded_variable.reads_allowed():
            values = variable.read_value()
        key = tensor.checkpoint_key
        changed = self._changed(key, values)
        per_row = values.shape.rank == 1
        # Ranks that share rows have equal slots with a value per row.
        if spec.cell is None or (per_row and spec.cell[1]):
            none = np.zeros([0], np.int64)
            return Rows(key, values, none, none, None, 0)
        ids = placement.ids_at(changed, spec.cell[0], spec.row_parts)
        changed, ids = changed[ids < spec.rows], ids[ids < spec.rows]
        columns = None if per_row else spec.columns
        return Rows(key, values, changed, ids, columns, len(values))

    def _of_entry(self, entry: Entry) -> Rows | None:
        key, spec, values = entry
        if not values.shape.rank or values.dtype in (tf.string, tf.variant):
            return None
        with tf.device("CPU:0"):
            values = tf.identity(values)  # of a variable
        changed = self._changed(key, values)
        ids = changed + first_changed_row(spec)
        return Rows(key, values, changed, ids, None, len(values), entry)


def trackable_of(tensor: Any) -> Any:
    """The object that a saver's tensor belongs to."""
    return getattr(tensor.trackable, "obj", tensor.trackable)


def is_table(tensor: Any) -> bool:
    """Whether a saver's tensor is a part of a partitioned table or slot."""
    return marks.shard_spec(trackable_of(tensor)) is not None


def object_of(key: str) -> str:
    """The name of what a tensor of a checkpoint belongs to."""
    return key.partition("/.ATTRIBUTES/")[0]
