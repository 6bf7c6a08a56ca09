# SPDX-License-Identifier: Apache-2.0
"""Shards in TensorFlow checkpoints: slices of one table, never gathered.

TensorFlow's format stores slices of a tensor. Every rank writes a block of rows
or columns. After the index files are merged, plain TensorFlow reads the blocks
as one table. The shards of a table that is not placed by column hold rows from
all of the table, so ranks first exchange rows to make contiguous blocks. This
needs memory for a second copy of the shard while a checkpoint is written or
read.
"""

from __future__ import annotations

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
from tfdist_ext.tables import placement
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.type_names import Trackable

if TYPE_CHECKING:
    from tfdist_ext.comm.collectives import Collectives

_KEY = "VARIABLE_VALUE"


def attach(
    variable: tf.Variable, spec: ShardSpec, collectives: Collectives
) -> None:
    """Makes a shard save and restore itself as a slice of its table."""
    shard = _SavedShard(variable, spec, collectives)
    save_by(variable, shard.serialize, shard.restore)
    marks.set_collectives(variable, collectives)
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


class _SavedShard:
    """Saves one shard to checkpoints and restores it."""

    def __init__(
        self, variable: tf.Variable, spec: ShardSpec, collectives: Collectives
    ) -> None:
        self._variable = variable
        self._spec = spec
        self._collectives = collectives
        self._saved_rows = spec.rows

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

    def serialize(self) -> dict[str, object]:
        """Returns the slice of this rank; it is computed when written."""
        slice_spec = "" if self._whole else self._slice()
        make = self._gather if self._whole else self._block
        if self._by_column:
            make = self._variable.read_value
        return {
            _KEY: {
                slice_spec: internals.SaveSpec(
                    tensor=make,
                    slice_spec=slice_spec,
                    name=_KEY,
                    dtype=self._variable.dtype,
                    device=self._variable.device,
                )
            }
        }

    def restore(
        self, restored: dict[str, tf.Tensor | dict[str, tf.Tensor]]
    ) -> tf.Operation:
        """Assigns this rank's part of the values that were read."""
        value = restored[_KEY]
        if isinstance(value, dict):
            (value,) = value.values()
        if self._saved_rows < self._spec.rows:
            value = self._padded_to_rows(value)
        if not self._by_column:
            value = self._pick(value) if self._whole else self._spread(value)
        if self._saved_rows < self._spec.rows:
            value = self._with_new_rows(value)
        return self._variable.assign(value)

    def slice_in(self, shape: tuple[int, ...]) -> str:
        """Returns the slice to read from a table with fewer rows.

        Args:
            shape: the shape of the table in the file.

        Raises:
            ValueError: if the file's table has more rows.
        """
        _check_rows(self._spec.table, self._spec.rows, shape[0])
        self._saved_rows = shape[0]
        return "" if self._whole else self._slice(shape[0])

    def _slice(self, rows: int | None = None) -> str:
        spec = self._spec
        rows = rows or spec.rows
        if self._by_column:
            first, end = spec.columns
            return f"{rows} {spec.dim} 0,{rows}:{first},{end - first}"
        first, end = self._rows_of(spec.rank)
        # Of fewer rows, this rank may have none. It then reads an unused row.
        first, end = min(first, rows - 1), max(min(end, rows), 1)
        size = max(end - first, 1)
        if self._variable.shape.rank == 1:
            return f"{rows} {first},{size}"
        return f"{rows} {spec.dim} {first},{size}:0,{spec.dim}"

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
        return self._padded(tf.gather(whole, ids))

    def _padded(self, rows: tf.Tensor) -> tf.Tensor:
        """Appends padding, to make the variable's value."""
        missing = self._spec.local_rows - tf.shape(rows)[0]
        padding = [[0, missing]] + [[0, 0]] * (rows.shape.rank - 1)
        return tf.pad(rows, padding)

    def _ids_in_block(self, rank: int, part: int) -> np.ndarray:
        """Returns a part's ids among a rank's contiguous rows, ascending."""
        ids = np.arange(*self._rows_of(rank))
        return ids[placement.part_of(ids, self._spec.row_parts) == part]

    def _block(self) -> tf.Tensor:
        """Exchanges rows to make this rank's contiguous block.

        The exchange ends before this returns. The parts are joined when they
        are written, which may be during training.
        """
        spec = self._spec
        width = self._widths()[spec.rank]
        sizes = np.diff(self._local_rows()) * width
        flat, received = self._collectives.all_to_all(
            tf.reshape(self._variable.read_value(), [-1]),
            tf.constant(sizes, tf.int64),
            f"{spec.table}/save",
        )
        marks.set_assembly(flat, functools.partial(self._assemble, received))
        return flat

    def _assemble(self, received: tf.Tensor, flat: tf.Tensor) -> tf.Tensor:
        spec = self._spec
        first, end = self._rows_of(spec.rank)
        dims = self._variable.shape.rank
        block = np.empty((end - first, spec.dim)[:dims], flat.numpy().dtype)
        pieces = np.split(flat.numpy(), np.cumsum(received.numpy())[:-1])
        for rank, piece in enumerate(pieces):
            part = spec.at(rank)
            if part.cell is None:
                continue
            ids = self._ids_in_block(spec.rank, part.cell[0])
            columns: Any = (slice(*part.columns),)[: dims - 1]
            shape = (-1, part.local_dim)[:dims]
            block[(ids - first, *columns)] = piece.reshape(shape)[: len(ids)]
        return tf.constant(block)

    def _spread(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns this rank's shard, given the contiguous rows it has read."""
        spec = self._spec
        block = rows.numpy()
        first, _ = self._rows_of(spec.rank)
        pieces = []
        for part in map(spec.at, range(spec.world_size)):
            piece = block[:0]
            if part.cell is not None:
                ids = self._ids_in_block(spec.rank, part.cell[0])
                columns = (slice(*part.columns),)[: block.ndim - 1]
                piece = block[(ids - first, *columns)]
            pieces.append(piece.reshape(-1))
        flat, _ = self._collectives.all_to_all(
            tf.concat(pieces, 0),
            tf.constant([len(piece) for piece in pieces], tf.int64),
            f"{spec.table}/restore",
        )
        shape = (-1, spec.local_dim)[: block.ndim]
        return self._padded(tf.reshape(flat, shape))
