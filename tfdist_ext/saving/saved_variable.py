# SPDX-License-Identifier: Apache-2.0
"""Large variables of one process in checkpoints: pieces, without a copy."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext.embedding import checkpoint_slices
from tfdist_ext.embedding.checkpoint_slices import Piece
from tfdist_ext.ops.checkpoint_ops import Cells
from tfdist_ext.ops.checkpoint_ops import Grouped
from tfdist_ext.ops.checkpoint_ops import StoredSlice
from tfdist_ext.ops.checkpoint_ops import read_piece
from tfdist_ext.ops.snapshot_ops import RowSnapshot
from tfdist_ext.saving import changed_rows
from tfdist_ext.type_names import Trackable

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


class SavedVariable:
    """Saves a large variable in pieces of rows, and restores it from them.

    Args:
        variable: a variable in host memory, of more than one piece.
        slices: the pieces, see the attribute; None for pieces of equal size of
            at most `checkpoint_slices.PIECE` bytes.

    Attributes:
        table: name of the variable.
        slices: slices of the pieces, in TensorFlow's notation. They have all
            columns, and their rows follow each other.
        shape: shape of the variable.
        dtype: dtype of the variable.
    """

    def __init__(
        self, variable: tf.Variable, slices: Sequence[str] | None = None
    ) -> None:
        self._variable = variable
        self.table = variable.name
        self.shape = tuple(variable.shape)
        self.dtype = variable.dtype
        self.slices = slices or self._equal_slices()
        rows = [each.split(" ")[-1].split(":")[0] for each in self.slices]
        pairs = np.array([each.split(",") for each in rows], np.int64)
        self._first, self._rows = pairs.T

    def _equal_slices(self) -> list[str]:
        count = _pieces(self._variable)
        bounds = np.arange(count + 1) * self.shape[0] // count
        sizes = " ".join(map(str, self.shape))
        rest = ":-" * (len(self.shape) - 1)
        return [
            f"{sizes} {first},{last - first}{rest}"
            for first, last in itertools.pairwise(bounds)
        ]

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return len(self.slices)

    def in_slices(self, slices: Sequence[str]) -> SavedVariable:
        """The same in other pieces; see the argument `slices`."""
        return SavedVariable(self._variable, slices)

    def snapshot(self) -> dict[str, Piece]:
        """The pieces by slice, as they are now; another thread may read."""
        snapshot = RowSnapshot(self._variable)

        def read(piece: int) -> tf.Tensor:
            return snapshot.take(self._rows_of(piece))

        return {
            self.slices[i]: Piece(
                tf.TensorShape([self._rows[i], *self.shape[1:]]),
                self.dtype,
                functools.partial(read, i),
            )
            for i in range(self.pieces)
        }

    def read_piece(
        self,
        piece: int,
        find: Callable[[str, tf.DType], StoredSlice | None],
        read: Callable[[str], tf.Tensor],
    ) -> Grouped:
        """Reads a piece that the files have as it is; may run in any thread.

        Args:
            piece: number of the piece.
            find: returns where a slice of a dtype is.
            read: not used, see `SavedShard.read_piece`.
        """
        del read
        stored = find(self.slices[piece], self.dtype)
        assert stored is not None
        columns = math.prod(self.shape[1:])
        stored = dataclasses.replace(stored, shape=(stored.shape[0], columns))
        one = Cells(0, 1, 0, np.array([[0, 0, columns]]))
        return read_piece(stored, self.dtype, one)

    def assign_piece(
        self, piece: int, found: Grouped | None, error: str = ""
    ) -> None:
        """Assigns a piece; see `SavedShard.assign_piece`."""
        if found is None:
            raise tf.errors.InvalidArgumentError(None, None, error)
        values = tf.reshape(found.own, [-1, *self.shape[1:]])
        self._variable.scatter_update(
            tf.IndexedSlices(values, self._rows_of(piece))
        )

    def _rows_of(self, piece: int) -> np.ndarray:
        return self._first[piece] + np.arange(self._rows[piece])


def saved_variable(key: str, found: Trackable) -> SavedVariable | None:
    """What saves and restores a large variable of one process.

    Args:
        key: key of a tensor in a checkpoint.
        found: the object that it belongs to.

    Returns:
        None for a variable that fits into a piece, is on a GPU, or has strings
        or a shape that may change, and for other objects.
    """
    if not key.endswith(_VALUE) or changed_rows.is_sum(found):
        return None
    variable = changed_rows.variable_of(found)
    if isinstance(variable, tf.distribute.DistributedValues):
        strategy = variable.distribute_strategy
        replicas = strategy.experimental_local_results(variable)
        variable = replicas[0] if len(replicas) == 1 else None
    if not isinstance(variable, tf.Variable):
        return None
    if not variable.shape.is_fully_defined() or variable.dtype == tf.string:
        return None
    if _pieces(variable) < 2 or "GPU" in variable.device:
        return None
    return SavedVariable(variable)


def _pieces(variable: tf.Variable) -> int:
    size = variable.shape.num_elements() * variable.dtype.size
    rows = variable.shape[0] if variable.shape.rank else 1
    count = -(-size // checkpoint_slices.PIECE)
    return int(min(count, rows, checkpoint_slices.MOST_PIECES))
