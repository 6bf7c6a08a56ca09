# SPDX-License-Identifier: Apache-2.0
"""Variables of shards: their creation, reads and moves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext import thread_context
from tfdist_ext.embedding import checkpoint_slices
from tfdist_ext.keras_internals import value_of
from tfdist_ext.marks import is_fixed
from tfdist_ext.marks import shard_spec
from tfdist_ext.tables import placement
from tfdist_ext.tables.checks import Storage
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.thread_context import current
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Shape
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

if TYPE_CHECKING:
    from tfdist_ext.comm.collectives import Collectives

# Methods of a variable that conversions, operators, slices and gathers call.
_READS = ("value", "sparse_read", "gather_nd")


def reads_allowed() -> AbstractContextManager[None]:
    """Kernels read inside, by this thread, give this rank's part."""
    return thread_context.setting(reads_allowed=current.reads_allowed + 1)


def read_parts(original: Original[T], *args: Any, **kwargs: Any) -> T:
    with reads_allowed():
        return original(*args, **kwargs)


def refuse_read(variable: tf.Variable) -> None:
    """Makes a shard refuse to become a tensor outside of `reads_allowed`."""
    for name in _READS:
        setattr(variable, name, _checked(getattr(variable, name), variable))


def _checked(read: Callable[..., T], variable: tf.Variable) -> Callable[..., T]:
    @functools.wraps(read)
    def checked(*args: Any, **kwargs: Any) -> T:
        if not current.reads_allowed and not internals.is_updating():
            spec = shard_spec(variable)
            assert spec is not None
            raise ValueError(
                f"Table '{spec.table}' is partitioned: its kernel holds rank "
                f"{spec.rank}'s {spec.local_shape[0]} x {spec.local_shape[1]} "
                f"of {spec.rows} x {spec.dim} numbers, by local row numbers, "
                "and cannot be used for the whole table in an op, an index or "
                "a loss. Read the whole table, on all ranks: "
                "strategy.gather_table(layer), or get_embedding_tables() of a "
                "DistributedEmbedding. kernel.numpy() is this rank's part."
            )
        return read(*args, **kwargs)

    return checked


def fingerprints(rows: tf.Tensor) -> np.ndarray:
    """Returns a fingerprint of every row; equal rows have equal fingerprints.

    Args:
        rows: `[n, dim]`, of any numeric dtype.

    Returns:
        uint64 `[n]`.
    """
    if rows.shape.num_elements() == 0:
        return np.zeros([rows.shape[0]], np.uint64)
    with tf.device("CPU:0"):
        found = tf.raw_ops.Fingerprint(data=rows, method="farmhash64")
    numbers: np.ndarray = found.numpy().view(np.uint64)[:, 0]
    return numbers


@contextlib.contextmanager
def creating(spec: ShardSpec) -> Iterator[None]:
    """Variables created inside are this rank's part of a table."""
    # Under a strategy, `extended.py` goes before that.
    on_host = spec.storage == "host" and not spec.partitioned
    with (
        thread_context.setting(
            new_shard=spec if spec.partitioned else None,
            new_storage=spec.storage,
        ),
        tf.device("CPU:0") if on_host else contextlib.nullcontext(),
    ):
        yield


def storage_for(colocate_with: Variable | None) -> Storage:
    """Returns the storage of a variable that is being created.

    Args:
        colocate_with: see `spec_for`.

    Returns:
        "host" or "device", see `ShardSpec`.
    """
    spec = shard_spec(colocate_with)
    return current.new_storage or (spec.storage if spec else "device")


def spec_for(colocate_with: Variable | None) -> ShardSpec | None:
    """Returns the spec of a variable being created, None if it is no shard.

    Args:
        colocate_with: the weight of a slot, which optimizers pass, or None.
    """
    return current.new_shard or shard_spec(colocate_with)


def is_shard(variable: Variable) -> bool:
    """Whether a variable is a shard of a table, or a slot of a shard."""
    return shard_spec(variable) is not None


def mark(
    variable: tf.Variable, spec: ShardSpec, collectives: Collectives
) -> None:
    """Makes a local variable the shard that `spec` describes.

    A slot that does not have the table's shape, such as a step counter, stays
    an ordinary local variable.
    """
    rows = variable.shape[0] if variable.shape.rank else None
    matches = rows == spec.local_shape[0] and (
        variable.shape.rank == 1 or variable.shape == spec.local_shape
    )
    if matches:
        hold(variable, spec, collectives)
        if current.new_shard is not None:  # slots are in nobody's hands
            refuse_read(variable)


def hold(
    variable: tf.Variable, spec: ShardSpec, collectives: Collectives
) -> None:
    """Sets the spec of a variable of that shape, also in checkpoints."""
    marks.set_shard_spec(variable, spec)
    checkpoint_slices.attach(variable, spec, collectives)


def move_table(
    variable: tf.Variable,
    spec: ShardSpec,
    collectives: Collectives,
    block: int = 2**24,
) -> None:
    """Moves a table to another placement; a joint call of all ranks.

    Needs memory for the old part, the new part and 64 MiB (in float32). If a
    rank fails, the table is not moved on any rank.

    Args:
        variable: this rank's part of the table, `[rows, columns]`, a
            TensorFlow or Keras variable.
        spec: the new spec of the same table on this rank.
        collectives: the strategy's collectives.
        block: how many numbers all ranks exchange at a time.

    Raises:
        ValueError: if the spec is of another table, if the table is or would
            be unpartitioned, or if a graph or a slot relies on its placement.
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
    hold(native, spec, collectives)


class _Routes:
    """The rows and columns that every rank sends to every other rank."""

    def __init__(self, old: ShardSpec, new: ShardSpec, ids: TensorLike) -> None:
        self.old, self.new, self.ids = old, new, ids
        self._senders = placement.part_of(ids, old.row_parts)
        self._receivers = placement.part_of(ids, new.row_parts)

    def sent_by(self, rank: int) -> np.ndarray:
        """Returns the ids of the rows of which a rank has columns."""
        cell = self.old.at(rank).cell
        return self.ids[self._senders == cell[0]] if cell else self.ids[:0]

    def piece(self, sender: int, receiver: int) -> tuple[np.ndarray, slice]:
        """Returns ids and columns that one rank sends to another."""
        old, new = self.old.at(sender), self.new.at(receiver)
        first = max(old.columns[0], new.columns[0])
        end = min(old.columns[1], new.columns[1])
        if old.cell is None or new.cell is None or first >= end:
            return self.ids[:0], slice(0, 0)
        mine = self._senders == old.cell[0]
        theirs = self._receivers == new.cell[0]
        return self.ids[mine & theirs], slice(first, end)


def _move_rows(
    native: tf.Variable,
    part: np.ndarray,
    routes: _Routes,
    collectives: Collectives,
) -> None:
    """Exchanges rows and writes those that this rank receives to `part`."""
    old, new = routes.old, routes.new
    ranks = range(old.world_size)
    sent = routes.sent_by(old.rank)
    rows = _rows(native, placement.local_row(sent, old.row_parts))
    pieces = []
    for receiver in ranks:
        ids, columns = routes.piece(old.rank, receiver)
        chosen = rows[np.searchsorted(sent, ids)]
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
    for sender in ranks:
        ids, columns = routes.piece(sender, new.rank)
        size = len(ids) * (columns.stop - columns.start)
        local = placement.local_row(ids, new.row_parts)
        start = new.columns[0]
        target = slice(columns.start - start, columns.stop - start)
        if size:
            part[local, target] = received[place : place + size].reshape(
                len(ids), -1
            )
        place += size


def _rows(native: tf.Variable, local: np.ndarray) -> np.ndarray:
    with reads_allowed():
        rows: np.ndarray = native.sparse_read(local).numpy()
    return rows


def _check(variable: Variable, old: ShardSpec | None, new: ShardSpec) -> None:
    if (
        old is None
        or not new.partitioned
        or (old.table, old.rows, old.dim, old.rank, old.world_size)
        != (new.table, new.rows, new.dim, new.rank, new.world_size)
    ):
        raise ValueError(
            f"{old or 'A variable that is no part of a table'} cannot become "
            f"{new}: only a partitioned table can be moved, among the same "
            "ranks."
        )
    if is_fixed(variable):
        raise ValueError(
            f"Table '{new.table}' cannot be moved: it has been trained, or a "
            "tf.function that looks up in it has been traced."
        )


def local_variable(
    initial: Callable[[], tf.Tensor],
    name: str,
    shape: Shape = None,
    beside: Variable | None = None,
) -> tf.Variable:
    """Creates a variable of this rank that no checkpoint has.

    Args:
        initial: returns the initial value.
        name: name of the variable.
        shape: shape of all values; None for that of the initial value.
        beside: variable on whose device it is; None for host memory.
    """
    with tf.init_scope():
        strategy = tf.distribute.get_strategy()
        options = {
            "trainable": False,
            "name": name,
            "synchronization": tf.VariableSynchronization.NONE,
        }
        if beside is None:
            return tf.Variable(initial(), shape=shape, **options)
        with strategy.extended.colocate_vars_with(value_of(beside)):
            return tf.Variable(initial(), shape=shape, **options)
