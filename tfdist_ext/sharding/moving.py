# SPDX-License-Identifier: Apache-2.0
"""Moves a table to other ranks, or in other parts, in the same variables.

Only before anything relies on where its parts lie (`marks.is_fixed`): a graph
has the shape of a part in it, and slots lie beside their rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.keras_internals import value_of
from tfdist_ext.marks import is_fixed
from tfdist_ext.marks import shard_spec
from tfdist_ext.sharding import kernel_reads
from tfdist_ext.sharding import sharded_variable
from tfdist_ext.tables import rotated_mod
from tfdist_ext.tables.shard_spec import ShardSpec

if TYPE_CHECKING:
    from tfdist_ext.collectives.collectives import Collectives


def move(
    variable: Any, spec: ShardSpec, collectives: Collectives, block: int = 2**24
) -> None:
    """Moves a table, with its values; all ranks must call.

    Needs room for the old part, the new one and 64 MiB in float32. If a rank
    fails, the table stays where it was on all of them.

    Args:
        variable: this rank's part of it, `[rows, columns]`, of TensorFlow or
            Keras.
        spec: what it shall hold, of the same table.
        collectives: of the strategy.
        block: how many numbers of all ranks are under way at once.

    Raises:
        ValueError: for another table, one that is or shall be whole on every
            rank, or if a graph or a slot relies on it.
    """
    old = shard_spec(variable)
    _check(variable, old, spec)
    assert old is not None
    native = value_of(variable)
    part = np.zeros(spec.local_shape, native.dtype.as_numpy_dtype)
    step = max(1, block // spec.dim)
    for first in range(0, spec.rows, step):
        ids = np.arange(first, min(first + step, spec.rows))
        _move_rows(native, part, _Routes(old, spec, ids), collectives)
    value = tf.constant(part)
    collectives.barrier(f"{spec.table}/moved")
    internals.replace_value(native, value)
    if variable is not native:
        variable._shape = spec.local_shape
    sharded_variable.hold(native, spec, collectives)


class _Routes:
    """Which of some rows every rank gives to every other one."""

    def __init__(self, old: ShardSpec, new: ShardSpec, ids: Any) -> None:
        self.old, self.new, self.ids = old, new, ids
        self._givers = rotated_mod.part_of(ids, old.row_parts)
        self._takers = rotated_mod.part_of(ids, new.row_parts)

    def given_by(self, rank: int) -> Any:
        """The ids of which a rank has columns."""
        cell = self.old.at(rank).cell
        return self.ids[self._givers == cell[0]] if cell else self.ids[:0]

    def piece(self, giver: int, taker: int) -> tuple[Any, slice]:
        """Ids and columns that one rank gives to another, none or some."""
        old, new = self.old.at(giver), self.new.at(taker)
        first = max(old.columns[0], new.columns[0])
        end = min(old.columns[1], new.columns[1])
        if old.cell is None or new.cell is None or first >= end:
            return self.ids[:0], slice(0, 0)
        mine = self._givers == old.cell[0]
        return self.ids[mine & (self._takers == new.cell[0])], slice(first, end)


def _move_rows(
    native: Any, part: np.ndarray, routes: _Routes, collectives: Collectives
) -> None:
    """Exchanges some rows and puts those that this rank takes into `part`."""
    old, new = routes.old, routes.new
    ranks = range(old.world_size)
    given = routes.given_by(old.rank)
    rows = _rows(native, rotated_mod.local_row(given, old.row_parts))
    pieces = []
    for taker in ranks:
        ids, columns = routes.piece(old.rank, taker)
        chosen = rows[np.searchsorted(given, ids)]
        start = old.columns[0]
        pieces.append(
            chosen[:, max(columns.start - start, 0) : columns.stop - start]
            if len(ids)
            else chosen[:, :0]
        )
    flat, _ = collectives.all_to_all(
        tf.constant(np.concatenate([piece.reshape(-1) for piece in pieces])),
        tf.constant([piece.size for piece in pieces], tf.int64),
        f"{old.table}/move",
    )
    received, place = flat.numpy(), 0
    for giver in ranks:
        ids, columns = routes.piece(giver, new.rank)
        size = len(ids) * (columns.stop - columns.start)
        local = rotated_mod.local_row(ids, new.row_parts)
        start = new.columns[0]
        target = slice(columns.start - start, columns.stop - start)
        if size:
            part[local, target] = received[place : place + size].reshape(
                len(ids), -1
            )
        place += size


def _rows(native: Any, local: Any) -> np.ndarray:
    with kernel_reads.allowed():
        rows: np.ndarray = native.sparse_read(local).numpy()
    return rows


def _check(variable: Any, old: ShardSpec | None, new: ShardSpec) -> None:
    if (
        old is None
        or not new.partitioned
        or (old.table, old.rows, old.dim, old.rank, old.world_size)
        != (new.table, new.rows, new.dim, new.rank, new.world_size)
    ):
        raise ValueError(
            f"{old or 'A variable that is no part of a table'} cannot become "
            f"{new}: only a partitioned table is moved, among the same ranks."
        )
    if is_fixed(variable):
        raise ValueError(
            f"Table '{new.table}' cannot be moved: it has been trained, or a "
            "tf.function that looks up in it has been traced."
        )
