# SPDX-License-Identifier: Apache-2.0
"""Delta checkpoints: the rows that have changed since a full checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.embedding.checkpoint_slices import Piece
from tfdist_ext.embedding.checkpoint_slices import SavedShard
from tfdist_ext.embedding.sharded_variable import fingerprints
from tfdist_ext.keras_internals import value_of
from tfdist_ext.saving.checkpoint_files import Opened
from tfdist_ext.tables import placement
from tfdist_ext.type_names import SavedTensor
from tfdist_ext.type_names import Trackable
from tfdist_ext.type_names import Variable


def variable_of(trackable: Trackable) -> tf.Variable:
    """TensorFlow's variable of a Keras variable; other objects unchanged."""
    if isinstance(trackable, tf.distribute.DistributedValues):
        return trackable
    return value_of(trackable)


def collectives_of(objects: Iterable[Trackable]) -> Collectives | None:
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


def is_shard(trackable: Trackable) -> bool:
    """Whether an object is a shard of a table or of a slot."""
    found = variable_of(trackable)
    if isinstance(found, tf.distribute.DistributedValues):
        return False
    return marks.collectives_of_shard(found) is not None


def slicing(trackable: Trackable) -> Callable[[tuple[int, ...]], str] | None:
    """How to read a growing table from a smaller checkpoint, else None."""
    found = variable_of(trackable)
    if isinstance(found, tf.distribute.DistributedValues):
        return None
    return marks.slicing(found)


def is_sum(trackable: Trackable) -> bool:
    """Whether reading it is an exchange, as for a metric of tf_keras."""
    return isinstance(variable_of(trackable), internals.SyncOnReadVariable)


def read_sums(
    tensors: Sequence[SavedTensor], collectives: Collectives | None
) -> None:
    """Reads variables that are reduced over the ranks, sums in one exchange."""
    if collectives is None:
        return
    specs, own = [], []
    for tensor in tensors:
        found = trackable_of(tensor)
        if not is_sum(found):
            continue
        spec = tensor._tensor_save_spec
        variable = variable_of(found)
        if variable.aggregation == tf.VariableAggregation.SUM:
            specs.append(spec)
            own.append(internals.components(variable)[0].read_value())
        else:
            spec._tensor = spec.tensor
    sums = collectives.all_reduce(own, "checkpoint/sums")
    for spec, total in zip(specs, sums, strict=True):
        spec._tensor = total


def is_of_one_rank(trackable: Trackable) -> bool:
    """Whether every rank has its own state, as for a dataset's iterator."""
    return isinstance(trackable, tf.data.Iterator)


def name_of_rank(name: str, rank: int) -> str:
    """Name under which a rank saves a state of its own."""
    return f"{name}/rank_{rank}" if rank else name


_IDS = re.compile(r"(.*)/rows_of_(\d+)/ids")


def delta_entries(
    key: str,
    rank: int,
    ids: np.ndarray,
    columns: tuple[int, int] | None,
    values: tf.Tensor,
) -> list[tuple[str, str, tf.Tensor]]:
    """The entries of a rank for the rows of a tensor.

    Args:
        key: name of the tensor.
        rank: rank that writes.
        ids: ids of the rows, int64 `[n]`.
        columns: first column and the one after the last; None for all.
        values: `[n, ...]`.

    Returns:
        Names, slices and values.
    """
    name = f"{key}/rows_of_{rank}"
    return [
        (f"{name}/ids", "", tf.constant(ids, tf.int64)),
        (f"{name}/columns", "", tf.constant(columns or (0, -1), tf.int64)),
        (f"{name}/values", "", values),
    ]


def first_changed_row(spec: str) -> int:
    """The first row of a slice in TensorFlow's notation, "" for all."""
    return _offsets(spec)[0]


class DeltaRows:
    """The rows in a delta checkpoint.

    Args:
        path: path of the checkpoint.

    Attributes:
        keys: names of the tensors of which it has some rows; it has all other
            tensors entirely.

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
        """Replaces rows of a value that was read from the full checkpoint.

        Args:
            key: name of the tensor.
            spec: slice of the tensor that the value is, "" for all of it.
            value: value in the full checkpoint.
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


# Name, slice of the tensor ("" for all of it), values.
Entry = tuple[str, str, tf.Tensor | Piece]
Marks = dict[str, np.ndarray]
# Share of an object's bytes; if more have changed, all are written.
_MOST = 0.5


@dataclasses.dataclass
class Rows:
    """This rank's rows of a tensor.

    Attributes:
        key: name of the tensor.
        values: `[n, ...]`; may have further rows, which are not written.
        changed: local numbers of the changed rows, int64 `[m]`.
        ids: numbers of the changed rows in the entire tensor, int64 `[m]`.
        columns: first column in the entire tensor and the one after the last;
            None for all.
        rows: n; 0 if another rank writes the same rows.
        entry: entry that writes the tensor entirely, None for a shard of a
            table.
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
        """The name of the object that the tensor belongs to."""
        return object_of(self.key)

    def bytes(self) -> np.ndarray:
        """Bytes of the changed rows, and of all rows; int64 `[2]`."""
        size = self.values.dtype.size * int(np.prod(self.values.shape[1:]))
        return np.array([len(self.changed), self.rows], np.int64) * size

    def entries(self, rank: int) -> list[Entry]:
        """The entries that write the changed rows."""
        if not self.rows:
            return []
        with tf.device("CPU:0"):
            rows = tf.gather(self.values, self.changed)
        return delta_entries(self.key, rank, self.ids, self.columns, rows)


class ChangedRows:
    """The changes since a full checkpoint, or a record for the next one.

    Args:
        since: fingerprints at the full checkpoint; None to make a full one.

    Attributes:
        now: fingerprints at this checkpoint.
        share: share of all bytes that have changed, as far as this rank knows.
    """

    def __init__(self, since: Marks | None) -> None:
        self._since = since
        self.now: Marks = {}
        self.share = 1.0

    @property
    def since_full(self) -> bool:
        """Whether only changes are written."""
        return self._since is not None

    def note(
        self, tables: Iterable[Variable], entries: Iterable[Entry]
    ) -> list[Rows]:
        """Records the fingerprints of rows, and finds the changed ones.

        Args:
            tables: shards of tables, as tensors of a saver.
            entries: entries of everything else.

        Returns:
            The tensors that can be written by row.
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
        """Names of objects written by row, the same on all ranks.

        Args:
            rows: tensors of this rank.
            shared: names of objects of which all ranks write parts; rank 0
                decides on the others.
            collectives: collectives of the strategy, None in one process.
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

    def _of_table(self, tensor: SavedTensor) -> Rows:
        variable = variable_of(trackable_of(tensor))
        spec = marks.shard_spec(variable)
        assert spec is not None
        with sharded_variable.reads_allowed():
            values = variable.read_value()
        key = tensor.checkpoint_key
        changed = self._changed(key, values)
        per_row = values.shape.rank == 1
        # Ranks with the same rows have equal slots with one value per row.
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
            values = tf.identity(values)  # reads a variable
        changed = self._changed(key, values)
        ids = changed + first_changed_row(spec)
        return Rows(key, values, changed, ids, None, len(values), entry)


def trackable_of(tensor: SavedTensor) -> Trackable:
    """The object that a saver's tensor belongs to."""
    return getattr(tensor.trackable, "obj", tensor.trackable)


def saved_shard(trackable: Trackable) -> SavedShard | None:
    """What saves and restores a shard; None for other objects."""
    found = variable_of(trackable)
    if isinstance(found, tf.distribute.DistributedValues):
        return None
    shard: SavedShard | None = marks.saved_shard(found)
    return shard


def is_table(tensor: SavedTensor) -> bool:
    """Whether a saver's tensor is a shard of a table or of a slot."""
    return marks.shard_spec(trackable_of(tensor)) is not None


def object_of(key: str) -> str:
    """The name of the object that a tensor of a checkpoint belongs to."""
    return key.partition("/.ATTRIBUTES/")[0]
