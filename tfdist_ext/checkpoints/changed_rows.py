# SPDX-License-Identifier: Apache-2.0
"""What a delta checkpoint has: the rows that a full one has not.

A rank keeps a fingerprint of every row that it had when the full checkpoint
was made. A row whose fingerprint is another one now is written, with its
number in the whole tensor, by the rank that has it: no rows are exchanged.
What has changed for the most part is written whole, as in a full checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.checkpoints import delta_rows
from tfdist_ext.checkpoints import saved_objects
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.sharding import kernel_reads
from tfdist_ext.sharding.fingerprints import fingerprints
from tfdist_ext.tables import rotated_mod

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
        return delta_rows.entries(self.key, rank, self.ids, self.columns, rows)


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
        variable = saved_objects.variable_of(trackable_of(tensor))
        spec = marks.shard_spec(variable)
        assert spec is not None
        with kernel_reads.allowed():
            values = variable.read_value()
        key = tensor.checkpoint_key
        changed = self._changed(key, values)
        per_row = values.shape.rank == 1
        # Ranks that share rows have equal slots with a value per row.
        if spec.cell is None or (per_row and spec.cell[1]):
            none = np.zeros([0], np.int64)
            return Rows(key, values, none, none, None, 0)
        ids = rotated_mod.ids_at(changed, spec.cell[0], spec.row_parts)
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
        ids = changed + delta_rows.first_row(spec)
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
