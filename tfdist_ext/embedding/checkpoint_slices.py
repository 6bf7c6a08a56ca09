# SPDX-License-Identifier: Apache-2.0
"""Shards in TensorFlow checkpoints: slices of one table, never gathered.

TensorFlow's format stores slices of a tensor. Every rank writes a block of rows
or columns, a large block in pieces of at most `PIECE` bytes. After the index
files are merged, plain TensorFlow reads the pieces as one table. The shards of
a table that is not placed by column hold rows from all of the table, so ranks
first exchange rows to make contiguous blocks, piece by piece.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.embedding import whole_tables
from tfdist_ext.ops.checkpoint_ops import Cells
from tfdist_ext.ops.checkpoint_ops import Grouped
from tfdist_ext.ops.checkpoint_ops import StoredSlice
from tfdist_ext.ops.checkpoint_ops import read_piece
from tfdist_ext.ops.snapshot_ops import RowSnapshot
from tfdist_ext.tables import placement
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.type_names import Trackable

if TYPE_CHECKING:
    from tfdist_ext.comm.collectives import Collectives

_KEY = "VARIABLE_VALUE"
# Bytes of a piece. A rank needs memory for a few of them.
PIECE = 2**24
# Of a table: TensorFlow opens as many files to read it in one process.
MOST_PIECES = 512


def attach(
    variable: tf.Variable, spec: ShardSpec, collectives: Collectives
) -> None:
    """Makes a shard save and restore itself as a slice of its table."""
    shard = SavedShard(variable, spec, collectives)
    save_by(variable, shard.serialize, shard.restore)
    marks.set_collectives(variable, collectives)
    marks.set_saved_shard(variable, shard)
    if spec.grows:
        marks.set_slicing(variable, shard.slice_in)


def save_by(
    saved: Trackable,
    serialize: Callable[[], Mapping[str, object]],
    restore: Callable[..., object],
) -> None:
    """Replaces the functions that save and restore an object.

    Args:
        saved: an object that TensorFlow tracks.
        serialize: returns tensors, or `SaveSpec` of slices, by name.
        restore: receives the tensors that were read, by name.
    """
    saved._serialize_to_tensors = serialize
    saved._restore_from_tensors = restore


def attach_whole(variable: tf.Variable, table: str) -> None:
    """Lets an unpartitioned table or slot be restored from fewer rows.

    Args:
        variable: a variable of one process.
        table: the table's name, for errors.
    """

    def restore(restored: dict[str, tf.Tensor]) -> tf.Operation:
        (value,) = restored.values()
        _check_rows(table, variable.shape[0], value.shape[0])
        return variable.assign(
            tf.concat([value, variable.read_value()[value.shape[0] :]], 0)
        )

    variable._restore_from_tensors = restore


def _check_rows(table: str, rows: int, saved: int) -> None:
    if saved > rows:
        raise ValueError(
            f"Table '{table}' has {rows} rows; the checkpoint holds {saved}. "
            "The capacity of a dynamic vocabulary cannot become smaller: give "
            f"DynamicVocabulary a capacity of at least {saved - 1}. Nothing "
            "was restored."
        )


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a rank's slice, which is read when it is written.

    Attributes:
        shape: shape of the piece.
        dtype: dtype of the table.
        read: exchanges rows and returns the piece. All ranks must read their
            pieces, in the same order.
    """

    shape: tf.TensorShape
    dtype: tf.DType
    read: Callable[[], tf.Tensor]


# Copies local rows, which are an array of int64 `[n]`.
_ReadRows = Callable[[np.ndarray], tf.Tensor]
# `Collectives.all_to_all` without its label.
_AllToAll = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


class SavedShard:
    """Saves one shard to checkpoints and restores it.

    Args:
        variable: the shard.
        spec: its spec.
        collectives: collectives of the strategy.

    Attributes:
        table: name of the table.
        shape: shape of the entire table, or of a slot with a value per row.
        dtype: dtype of the table.
    """

    def __init__(
        self, variable: tf.Variable, spec: ShardSpec, collectives: Collectives
    ) -> None:
        self._variable = variable
        self._spec = spec
        self._collectives = collectives
        self._saved_rows = spec.rows
        self.table = spec.table
        self.shape = (spec.rows, spec.dim)[: variable.shape.rank]
        self.dtype = variable.dtype

    @property
    def _by_column(self) -> bool:
        # The parts are already slices of the table. Slots with one value per
        # row have no columns.
        by_column = self._spec.column_parts == self._spec.world_size
        return by_column and self._variable.shape.rank == 2

    @property
    def _whole(self) -> bool:
        # With so few rows, some ranks would have an empty block.
        spec = self._spec
        rows = -(-spec.rows // spec.row_parts)
        return not self._by_column and rows < spec.world_size

    @functools.cached_property
    def pieces(self) -> int:
        """Number of pieces of each rank's slice, the same on all ranks."""
        spec = self._spec
        if self._whole:
            return 1
        fewest = spec.rows
        if not self._by_column:
            fewest = int(np.diff(self._local_rows()).min())
        most = max(1, MOST_PIECES // spec.world_size)
        return max(1, min(-(-self._slice_bytes // PIECE), fewest, most))

    @property
    def piece_bytes(self) -> int:
        """Bytes of the largest piece of a rank."""
        return max(PIECE, self._slice_bytes // self.pieces)

    @property
    def _slice_bytes(self) -> int:
        """Bytes of the largest slice of a rank."""
        spec = self._spec
        if self._by_column:
            numbers = spec.rows * -(-spec.dim // spec.world_size)
        else:
            local = int(np.diff(self._local_rows()).max())
            columns = spec.dim if self._variable.shape.rank == 2 else 1
            numbers = local * spec.row_parts * columns
        return numbers * int(self._variable.dtype.size)

    def serialize(self) -> dict[str, object]:
        """Returns the slices of this rank; each is computed when written."""

        def made_by(make: Callable[[], object], slice_spec: str) -> Any:
            return internals.SaveSpec(
                tensor=make,
                slice_spec=slice_spec,
                name=_KEY,
                dtype=self._variable.dtype,
                device=self._variable.device,
            )

        if self._whole:
            return {_KEY: {"": made_by(self._gather, "")}}
        found = self.pieces_of_slice().items()
        return {_KEY: {key: made_by(each.read, key) for key, each in found}}

    def pieces_of_slice(self, snapshot: bool = False) -> dict[str, Piece]:
        """The pieces of this rank's slice.

        Args:
            snapshot: whether the pieces have the rows of now, and are read by
                another thread beside training; all ranks must call. Otherwise
                they have the rows of the time when they are read.

        Returns:
            The pieces by slice, in TensorFlow's notation. Empty if rank 0
            writes the whole table, because it has too few rows, and for a
            snapshot of a shard on a GPU.
        """
        on_host = "GPU" not in self._variable.device
        if self._whole or (snapshot and not on_host):
            return {}
        read: _ReadRows = self._read
        exchange: _AllToAll = self._all_to_all
        if snapshot:
            exchange = self._collectives.all_to_all_beside_steps(
                f"{self.table}/snapshot", self.dtype
            )
            read = RowSnapshot(self._variable).take
        pieces = self.pieces
        make = self._own_rows if self._by_column else self._block
        return {
            self._slice(piece, pieces): Piece(
                self._piece_shape(piece),
                self.dtype,
                functools.partial(make, piece, read, exchange),
            )
            for piece in range(pieces)
        }

    def restore(
        self, restored: dict[str, tf.Tensor | dict[str, tf.Tensor]]
    ) -> tf.Operation:
        """Assigns this rank's part of the values that were read."""
        value = restored[_KEY]
        if isinstance(value, dict):
            parts = list(value.values())
            value = tf.concat(parts, 0) if len(parts) > 1 else parts[0]
        if self._saved_rows < self._spec.rows:
            value = self._padded_to_rows(value)
        if not self._by_column:
            spread = self._pick if self._whole else self._spread
            value = self._padded(spread(value))
        if self._saved_rows < self._spec.rows:
            value = self._with_new_rows(value)
        return self._variable.assign(value)

    def read_whole(
        self, read: Callable[[str], tf.Tensor], shape: tuple[int, ...]
    ) -> dict[str, tf.Tensor]:
        """Reads what `restore` takes.

        Args:
            read: returns the values of a slice, in TensorFlow's notation.
            shape: the shape of the table in the file.

        Raises:
            ValueError: if a table that can grow has more rows in the file.
        """
        grows = self._spec.grows
        return {_KEY: read(self.slice_in(shape) if grows else self._slice())}

    def read_piece(
        self,
        piece: int,
        find: Callable[[str, tf.DType], StoredSlice | None],
        read: Callable[[str], tf.Tensor],
    ) -> Grouped:
        """Reads a piece of this rank's slice; may run in any thread.

        Args:
            piece: number of the piece.
            find: returns where a slice of a dtype is, if the files have it as
                it is. Slices are in TensorFlow's notation.
            read: returns the values of a slice, for those that `find` does
                not find.
        """
        slice_spec = self._slice(piece, self.pieces)
        stored = find(slice_spec, self.dtype)
        if stored is None:
            return self._grouped(read(slice_spec), piece, self.pieces)
        return read_piece(stored, self.dtype, self._cells(piece, self.pieces))

    def assign_piece(
        self, piece: int, found: Grouped | None, error: str = ""
    ) -> None:
        """Assigns what all ranks have read of a piece; a joint call.

        Args:
            piece: number of the piece.
            found: what `read_piece` has returned; None if it has failed.
            error: why it has failed, or empty.

        Raises:
            tf.errors.InvalidArgumentError: a rank has an error. Nothing is
                assigned on any rank.
        """
        spec, variable = self._spec, self._variable
        if found is None:
            nothing = tf.zeros([0], self.dtype)
            found = Grouped(nothing, nothing, np.zeros(spec.world_size, int))
        rows = self._rows_of_piece(piece)
        assign = functools.partial(
            self._collectives.assign_piece, label=f"{spec.table}/restore"
        )
        if "GPU" not in variable.device:
            return assign(variable, found, rows, error)
        local = np.concatenate([first + np.arange(n) for first, n in rows])
        with tf.device("CPU:0"):
            host = tf.Variable(self._read(local))
        ends = np.cumsum(rows[:, 1])
        rows = np.stack([ends - rows[:, 1], rows[:, 1]], 1)
        assign(host, found, rows, error)
        with tf.device(variable.device):
            variable.scatter_update(tf.IndexedSlices(host.read_value(), local))

    def _rows_of_piece(self, piece: int) -> np.ndarray:
        """Local rows of a piece of each rank, at most: first and number.

        Returns:
            int64 `[ranks, 2]`. The last row may be padding.
        """
        ranks = range(self._spec.world_size)
        bounds = np.array([self._bounds(rank, self.pieces) for rank in ranks])
        bounds = np.minimum(bounds, self._variable.shape[0])
        rows = np.stack([bounds[:, piece], np.diff(bounds)[:, piece]], 1)
        if self._by_column:  # other ranks have read nothing of this shard
            rows[np.arange(len(rows)) != self._spec.rank] = 0
        return rows

    def _piece_shape(self, piece: int) -> tf.TensorShape:
        """The shape of a piece of this rank's slice."""
        spec = self._spec
        first, end = map(int, self._bounds(spec.rank, self.pieces)[piece:][:2])
        if self._by_column:
            return tf.TensorShape([end - first, spec.local_dim])
        rows = min(end * spec.row_parts, spec.rows) - first * spec.row_parts
        return tf.TensorShape([rows, *self.shape[1:]])

    def slice_in(self, shape: tuple[int, ...]) -> str:
        """Returns the slice to read from a table with fewer rows.

        Args:
            shape: the shape of the table in the file.

        Raises:
            ValueError: if the file's table has more rows.
        """
        _check_rows(self._spec.table, self._spec.rows, shape[0])
        self._saved_rows = shape[0]
        return "" if self._whole else self._slice(rows=shape[0])

    def _slice(
        self, piece: int = 0, pieces: int = 1, rows: int | None = None
    ) -> str:
        """A piece of this rank's slice, in TensorFlow's notation.

        Args:
            piece: number of the piece.
            pieces: number of pieces.
            rows: rows of the table in the file; None for those of the table.
        """
        spec = self._spec
        rows = rows or spec.rows
        first, end = self._bounds(spec.rank, pieces)[piece : piece + 2]
        if not self._by_column:
            first, end = first * spec.row_parts, end * spec.row_parts
        # Of fewer rows, this rank may have none. It then reads an unused row.
        first, end = min(first, rows - 1), max(min(end, rows), 1)
        size = max(end - first, 1)
        if self._variable.shape.rank == 1:
            return f"{rows} {first},{size}"
        left, right = spec.columns if self._by_column else (0, spec.dim)
        return f"{rows} {spec.dim} {first},{size}:{left},{right - left}"

    def _padded_to_rows(self, value: tf.Tensor) -> tf.Tensor:
        """Pads the values of fewer rows to the number of rows here."""
        first, end = self._rows_of(self._spec.rank)
        if self._whole or self._by_column:
            first, end = 0, self._spec.rows
        value = value[: max(self._saved_rows - first, 0)]
        padding = [[0, end - first - value.shape[0]]]
        return tf.pad(value, padding + [[0, 0]] * (value.shape.rank - 1))

    def _with_new_rows(self, value: tf.Tensor) -> tf.Tensor:
        """Returns this rank's part, in which new rows are not changed."""
        spec = self._spec
        if spec.cell is None:
            return value
        ids = placement.ids_of_part(spec.cell[0], spec.row_parts, spec.rows)
        saved = np.zeros(spec.local_rows, bool)
        saved[: len(ids)] = ids < self._saved_rows
        saved = saved.reshape((-1, 1)[: value.shape.rank])
        return tf.where(saved, value, self._variable.read_value())

    def _local_rows(self) -> np.ndarray:
        """Returns the first local row of every rank's contiguous block."""
        spec = self._spec
        ranks = np.arange(spec.world_size + 1)
        return ranks * -(-spec.rows // spec.row_parts) // spec.world_size

    def _bounds(self, rank: int, pieces: int) -> np.ndarray:
        """First rows of a rank's pieces, and the end of the last; `[n + 1]`.

        They are rows of the table if it is placed by column, else local rows.
        """
        first, end = 0, self._spec.rows
        if not self._by_column:
            first, end = self._local_rows()[rank : rank + 2]
        return first + np.arange(pieces + 1) * (end - first) // pieces

    def _rows_of(self, rank: int) -> tuple[int, int]:
        """Returns the contiguous rows that a rank reads and writes."""
        first, end = self._local_rows()[rank : rank + 2] * self._spec.row_parts
        return int(first), int(min(end, self._spec.rows))

    def _widths(self) -> list[int]:
        """Returns how many columns every rank adds to a block, maybe 0."""
        spec = self._spec
        parts = map(spec.at, range(spec.world_size))
        if self._variable.shape.rank == 2:
            return [part.local_dim if part.cell else 0 for part in parts]
        # Ranks with columns of the same rows have equal slots.
        return [int(part.cell is not None) for part in parts]

    def _gather(self) -> tf.Tensor | None:
        """Returns the entire table on rank 0; a joint call of all ranks."""
        whole = whole_tables.gather(self._variable, self._collectives)
        return tf.constant(whole) if self._spec.rank == 0 else None

    def _pick(self, whole: tf.Tensor) -> tf.Tensor:
        spec = self._spec
        ids = np.zeros([0], np.int64)
        if spec.cell is not None:
            ids = placement.ids_of_part(spec.cell[0], spec.row_parts, spec.rows)
        if whole.shape.rank == 2:
            whole = whole[:, slice(*spec.columns)]
        return tf.gather(whole, ids)

    def _padded(self, rows: tf.Tensor) -> tf.Tensor:
        """Appends padding, to make the variable's value."""
        missing = self._spec.local_rows - tf.shape(rows)[0]
        padding = [[0, missing]] + [[0, 0]] * (rows.shape.rank - 1)
        return tf.pad(rows, padding)

    def _own_rows(
        self, piece: int, read: _ReadRows, exchange: _AllToAll
    ) -> tf.Tensor:
        """Returns rows of this rank's columns."""
        del exchange
        first, count = self._rows_of_piece(piece)[self._spec.rank]
        return read(first + np.arange(count))

    def _read(self, local: np.ndarray) -> tf.Tensor:
        """Copies local rows; a read of the variable may copy all of them."""
        with tf.device(self._variable.device):
            return tf.raw_ops.ResourceGather(
                resource=self._variable.handle,
                indices=tf.constant(local, tf.int64),
                dtype=self._variable.dtype,
            )

    def _all_to_all(
        self, flat: tf.Tensor, splits: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        return self._collectives.all_to_all(flat, splits, f"{self.table}/save")

    def _block(
        self, piece: int, read: _ReadRows, exchange: _AllToAll
    ) -> tf.Tensor:
        """Exchanges rows to make a piece of this rank's contiguous block."""
        width = self._widths()[self._spec.rank]
        wanted = self._rows_of_piece(piece)
        local = [first + np.arange(count) for first, count in wanted]
        rows = read(np.concatenate(local) if width else local[0][:0])
        flat, received = exchange(
            tf.reshape(rows, [-1]), tf.constant(wanted[:, 1] * width)
        )
        return self._assemble(received, piece, flat)

    def _assemble(
        self, received: tf.Tensor, piece: int, flat: tf.Tensor
    ) -> tf.Tensor:
        """Orders the rows of a piece, which are received by rank."""
        spec, widths = self._spec, self._widths()
        with tf.device("CPU:0"):
            if spec.column_parts == 1:
                parts = [tf.reshape(flat, [-1, max(widths)])]
            else:
                of_ranks = [
                    tf.reshape(values, [-1, widths[rank]])
                    for rank, values in enumerate(tf.split(flat, received))
                ]
                parts = [
                    tf.concat([of_ranks[rank] for rank in ranks], 0)
                    for ranks in map(self._ranks_of_columns, self._columns())
                ]
            if spec.row_parts > 1:
                parts = [
                    tf.gather(part, self._order(piece, column))
                    for column, part in enumerate(parts)
                ]
            block = tf.concat(parts, 1) if len(parts) > 1 else parts[0]
            shape = (-1, spec.dim)[: self._variable.shape.rank]
            return tf.reshape(block, shape)

    def _ranks_of_columns(self, column: int) -> list[int]:
        """The ranks that hold a column part."""
        cells = [self._spec.at(r).cell for r in range(self._spec.world_size)]
        return [r for r, cell in enumerate(cells) if cell and cell[1] == column]

    def _order(self, piece: int, column: int) -> np.ndarray:
        """Places of a piece's rows among those from ranks with some columns."""
        places = self._places_of_parts(piece, self.pieces)
        first, end = self._bounds(self._spec.rank, self.pieces)[piece:][:2]
        order = np.empty(sum(map(len, places)), np.int32)
        for number, rank in enumerate(self._ranks_of_columns(column)):
            part, _ = self._spec.at(rank).cell or (0, 0)
            # The last row of a shard may be padding.
            rows = np.arange(len(places[part]))
            order[places[part]] = number * (end - first) + rows
        return order

    def _places_of_parts(self, piece: int, pieces: int) -> list[np.ndarray]:
        """Returns places of the ids of each row part in a piece, int32."""
        parts = self._spec.row_parts
        first, end = self._bounds(self._spec.rank, pieces)[piece : piece + 2]
        local = np.arange(first, end)
        found = []
        for part in range(parts):
            ids = placement.ids_at(local, part, parts)
            ids = ids[ids < self._spec.rows]
            found.append((ids - first * parts).astype(np.int32))
        return found

    def _columns(self) -> range:
        """Column parts; ranks with the same rows have equal slots by row."""
        per_row = self._variable.shape.rank == 1
        return range(1 if per_row else self._spec.column_parts)

    def _cells(self, piece: int, pieces: int) -> Cells:
        """What each rank holds of a piece of this rank's slice."""
        spec = self._spec
        first = int(self._bounds(spec.rank, pieces)[piece])
        of_ranks = np.full([spec.world_size, 3], -1)
        if self._by_column:
            of_ranks[:, 1:] = 0
            of_ranks[spec.rank] = 0, 0, spec.local_dim
            return Cells(spec.rank, 1, first, of_ranks)
        for rank, width in enumerate(self._widths()):
            each = spec.at(rank)
            first_column = each.columns[0] if len(self.shape) == 2 else 0
            part = each.cell[0] if each.cell else -1
            of_ranks[rank] = part, first_column, width
        return Cells(spec.rank, spec.row_parts, first, of_ranks)

    def _grouped(self, rows: tf.Tensor, piece: int, pieces: int) -> Grouped:
        """Groups a piece of this rank's slice by the ranks that hold it."""
        spec = self._spec
        ranks = range(spec.world_size)
        if self._by_column:
            nothing = tf.reshape(rows[:0], [-1])
            return Grouped(rows, nothing, np.zeros_like(ranks))
        places = self._places_of_parts(piece, pieces)
        cells = self._cells(piece, pieces).of_ranks
        with tf.device("CPU:0"):
            rows = tf.reshape(rows, [rows.shape[0], -1])
            of_ranks = [
                tf.gather(rows[:, first : first + width], places[part])
                if part >= 0
                else rows[:0, :0]
                for part, first, width in cells
            ]
            own, of_ranks[spec.rank] = of_ranks[spec.rank], rows[:0]
            flat = [tf.reshape(each, [-1]) for each in of_ranks]
            splits = [each.shape[0] for each in flat]
            return Grouped(own, tf.concat(flat, 0), np.array(splits))

    def _spread(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns this rank's rows of the slices that all ranks have read."""
        spec = self._spec
        own, others, splits = self._grouped(rows, 0, 1)
        others, received = self._collectives.all_to_all(
            others, splits, f"{spec.table}/restore"
        )
        parts = tf.split(others, received)
        parts[spec.rank] = tf.reshape(own, [-1])
        shape = (-1, spec.local_dim)[: rows.shape.rank]
        return tf.reshape(tf.concat(parts, 0), shape)
