# SPDX-License-Identifier: Apache-2.0
"""What the rows of a model's tables look like, on this rank and on all."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.callbacks.snapshots import here
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.keras_internals import layers_of
from tfdist_ext.sharding import kernel_reads
from tfdist_ext.sharding.fingerprints import fingerprints
from tfdist_ext.tables import rotated_mod
from tfdist_ext.tables.shard_spec import ShardSpec

# Numbers of a table that are looked at at once.
_BLOCK = 1 << 22


@dataclasses.dataclass
class RowCounts:
    """Figures of the rows of a table that this rank counts for all ranks.

    Attributes:
        rows: how many.
        longest: the largest norm, of rows that are finite.
        not_finite: rows with NaN or infinity.
        changed: since the last time.
        dead: rows that have not changed since the first time.
    """

    rows: int
    longest: float
    not_finite: int
    changed: int
    dead: int

    def numbers(self) -> list[float]:
        """The fields in order."""
        return [float(value) for value in dataclasses.astuple(self)]


class WatchedTable:
    """A table of a model, whose rows are compared with what they were.

    Takes 9 bytes for every row of this rank, and 8 more until
    `longest_at_start` is called.

    Args:
        spec: which part of the table this rank has.
        variable: that holds it, of TensorFlow or Keras.
        collectives: of the strategy; None in one process.
    """

    def __init__(
        self, spec: ShardSpec, variable: Any, collectives: Collectives | None
    ) -> None:
        self.name = spec.table
        self.variable = variable
        self.keys = marks.keys_of(variable)
        self._spec = spec
        self._collectives = collectives
        self._marks = self._fingerprints()
        self._ever = np.zeros(len(self._marks), bool)
        self._start: np.ndarray | None = self._own_squares()

    @property
    def counts(self) -> bool:
        """Whether this rank counts its rows: no other one has their start."""
        if not self._spec.partitioned:
            return self._collectives is None or not self._collectives.group.rank
        return self._spec.cell is not None and self._spec.cell[1] == 0

    @property
    def adds(self) -> bool:
        """Whether this rank's squares count: of a whole table, one rank's."""
        return self._spec.partitioned or self.counts

    def norms(self) -> np.ndarray:
        """Norms of this rank's rows, float64 `[n]`; all ranks call."""
        return self._norms_of(self._own_squares())

    def longest(self) -> float:
        """The largest finite norm that this rank counts; all ranks call."""
        return self._longest_of(self.norms())

    def longest_at_start(self) -> float:
        """That when the table was made; all ranks call it, once."""
        assert self._start is not None
        norms, self._start = self._norms_of(self._start), None
        return self._longest_of(norms)

    def _longest_of(self, norms: np.ndarray) -> float:
        finite = norms[np.isfinite(norms)]
        return float(finite.max(initial=0.0)) if self.counts else 0.0

    def _own_squares(self) -> np.ndarray:
        """Squares of this rank's parts of rows, summed; float64 `[n]`."""
        return np.concatenate(
            [np.zeros([0])]
            + [_squares(_as_floats(block)) for block in self._blocks()]
        )

    def _norms_of(self, squares: np.ndarray) -> np.ndarray:
        if self._spec.column_parts > 1:
            assert self._collectives is not None
            squares = self._collectives.sum_over_peers(
                tf.constant(squares),
                self._spec.row_peers,
                f"{self.name}/norms",
            ).numpy()
        norms: np.ndarray = np.sqrt(squares[: self._rows()])
        return norms

    def look(self) -> RowCounts:
        """Counts rows, and notes what they are; all ranks call."""
        norms = self.norms()
        before, self._marks = self._marks, self._fingerprints()
        changed = self._marks != before
        self._ever |= changed
        finite = np.isfinite(norms)
        if not self.counts:
            return RowCounts(0, 0.0, 0, 0, 0)
        return RowCounts(
            len(norms),
            float(norms[finite].max(initial=0.0)),
            int(len(norms) - finite.sum()),
            int(changed.sum()),
            int(len(norms) - self._ever.sum()),
        )

    def _rows(self) -> int:
        """Rows without those that only fill up a part."""
        spec = self._spec
        if spec.cell is None:
            return 0
        return len(
            rotated_mod.ids_of_part(spec.cell[0], spec.row_parts, spec.rows)
        )

    def _fingerprints(self) -> np.ndarray:
        found = [fingerprints(block) for block in self._blocks()]
        found = [np.zeros([0], np.uint64), *found]
        return np.concatenate(found)[: self._rows()]

    def _blocks(self) -> list[tf.Tensor]:
        rows, dim = self._spec.local_shape
        with kernel_reads.allowed():
            whole = here(self.variable).read_value()
        step = max(1, _BLOCK // max(dim, 1))
        return [whole[i : i + step] for i in range(0, rows, step)]


def tables_of(
    model: Any, collectives: Collectives | None
) -> list[WatchedTable]:
    """The tables of the layers of this package in a model.

    Args:
        model: whose layers are built.
        collectives: of its strategy; None in one process.
    """
    found: dict[int, WatchedTable] = {}
    for layer in layers_of(model):
        if not hasattr(layer, "lookups") or not layer.built:
            continue
        for _, feature in layer.lookups():
            variable = layer.table_variables()[feature.table]
            if id(variable) not in found:
                found[id(variable)] = WatchedTable(
                    feature.spec, variable, collectives
                )
    return list(found.values())


def _squares(block: np.ndarray) -> np.ndarray:
    """Sums of the squares of rows, float64 `[n]`."""
    found = np.einsum("ij,ij->i", block, block).astype(np.float64)
    # Those of finite numbers may be too large for float32.
    large = np.flatnonzero(~np.isfinite(found))
    found[large] = np.square(block[large].astype(np.float64)).sum(axis=1)
    return found


def _as_floats(block: tf.Tensor) -> np.ndarray:
    floats: np.ndarray = tf.cast(block, tf.float32).numpy()
    return floats
