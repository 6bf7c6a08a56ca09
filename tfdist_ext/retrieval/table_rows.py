# SPDX-License-Identifier: Apache-2.0
"""Rows of a table as candidates: they stay on the ranks that own them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.embedding import stock_lookup
from tfdist_ext.keras_internals import value_of
from tfdist_ext.retrieval.search import Part
from tfdist_ext.sharding import kernel_reads
from tfdist_ext.sharding import whole_tables
from tfdist_ext.tables import rotated_mod
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.shard_spec import ShardSpec


class TableRows:
    """Candidates that are rows of a table, as they are at every search.

    Args:
        variable: a shard, or a variable that every rank has.
        rows: int64 `[n]`, which rows are candidates; None for all in order.
        name: of the layer that searches, for errors.

    Raises:
        ValueError: for rows that the table has not.
    """

    def __init__(self, variable: Any, rows: Any, name: str) -> None:
        self.variable = variable
        self._name = name
        self._places: dict[ShardSpec, tuple[tf.Tensor, tf.Tensor]] = {}
        spec = marks.shard_spec(variable)
        self._size = (spec.rows, spec.dim) if spec else tuple(variable.shape)
        size, self.dim = self._size
        self.rows = None
        self.count = size
        if rows is not None:
            self.rows = np.asarray(rows, np.int64)
            self.count = len(self.rows)
            wrong = self.rows[(self.rows < 0) | (self.rows >= size)]
            if self.rows.ndim != 1 or wrong.size:
                raise ValueError(
                    f"Argument `rows` must be [n] numbers of rows in [0, "
                    f"{size}). Received: shape {self.rows.shape}, with "
                    f"{wrong[:5].tolist()} (layer '{name}')."
                )

    def part(self, collectives: Collectives | None) -> Part:
        """What this rank scores now; all ranks must call."""
        spec = marks.shard_spec(self.variable)
        if spec is None or collectives is None or stock_lookup.is_asked():
            return self._whole(spec)
        if not tf.executing_eagerly():
            marks.fix(self.variable)  # a graph relies on where rows are
        local = value_of(self.variable).read_value()
        first, end = 0, spec.local_rows
        if spec.column_parts > 1:
            local, first, end = self._full_rows(local, spec, collectives)
        if spec not in self._places:
            with tf.init_scope():
                self._places[spec] = self._placed(spec, first, end)
        chosen, positions = self._places[spec]
        if self.rows is None:
            return Part(local[: tf.size(positions)], positions, False)
        return Part(tf.gather(local, chosen), positions, False)

    def _whole(self, spec: ShardSpec | None) -> Part:
        """All candidates, of a table that is whole here, or where it goes."""
        if stock_lookup.is_asked():
            whole = TablePlacement.data_parallel()
            name, (rows, dim) = self.variable.name, self._size
            spec = spec or ShardSpec.of(name, rows, dim, whole, 0, 1)
            found = stock_lookup.all_rows(self.variable, spec)
        else:
            with kernel_reads.allowed():
                found = tf.convert_to_tensor(value_of(self.variable))
        if self.rows is not None:
            found = tf.gather(found, self.rows)
        return Part(found, tf.range(self.count, dtype=tf.int64), True)

    def _placed(
        self, spec: ShardSpec, first: int, end: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Which of this rank's rows are candidates, and their positions.

        Args:
            spec: of the rank's part.
            first: the first of the part's local rows that this rank scores.
            end: the one after the last.
        """
        none = np.zeros([0], np.int64)
        if spec.cell is None:
            chosen, positions = none, none
        elif self.rows is None:
            args = (spec.cell[0], spec.row_parts, spec.rows, first, end)
            chosen, positions = none, rotated_mod.ids_of_part(*args)
        else:
            local = rotated_mod.local_row(self.rows, spec.row_parts)
            part = rotated_mod.part_of(self.rows, spec.row_parts)
            mine = (part == spec.cell[0]) & (local >= first) & (local < end)
            chosen, positions = local[mine] - first, np.flatnonzero(mine)
        return tf.constant(chosen, tf.int64), tf.constant(positions, tf.int64)

    def _full_rows(
        self, local: tf.Tensor, spec: ShardSpec, collectives: Collectives
    ) -> tuple[tf.Tensor, int, int]:
        """All columns of some rows, of parts that hold columns.

        The ranks that hold columns of the same rows share these out: each
        gets the other columns of its share. That is fewer numbers than their
        scores would be, and every score is summed in the order of one process.

        Returns:
            `[m, dim]`, and which of the part's local rows they are.
        """
        peers = spec.row_peers
        ends = [
            (i + 1) * spec.local_rows // max(len(peers), 1)
            for i in range(len(peers))
        ]
        # Shares lie, and parts come, in the order of the ranks.
        by_rank = sorted(peers)
        sizes = dict(zip(by_rank, np.diff([0, *ends]), strict=True))
        splits = [
            int(sizes.get(rank, 0)) * spec.local_dim
            for rank in range(spec.world_size)
        ]
        flat, _ = collectives.all_to_all(
            tf.reshape(local, [-1]),
            tf.constant(splits, tf.int64),
            f"{self._name}/columns",
        )
        if spec.cell is None:
            return tf.zeros([0, spec.dim], local.dtype), 0, 0
        share = int(sizes[spec.rank])
        first = ends[by_rank.index(spec.rank)] - share
        widths = {peer: spec.at(peer).local_dim for peer in peers}
        parts = tf.split(flat, [share * widths[p] for p in by_rank])
        by_peer = dict(zip(by_rank, parts, strict=True))
        columns = [tf.reshape(by_peer[p], [share, widths[p]]) for p in peers]
        return tf.concat(columns, axis=1), first, first + share


def variable_of(given: Any, table: str | None) -> Any:
    """The table that candidates were given as.

    Args:
        given: a layer, or its variable.
        table: its name, if the layer has several.

    Raises:
        ValueError: for a layer that is not built, or without that table, or a
            table whose vocabulary grows.
    """
    found = _variable_of(given, table)
    _refuse_growing(found)
    return found


def _variable_of(given: Any, table: str | None) -> Any:
    if not isinstance(given, tf.keras.layers.Layer):
        return given
    if not given.built:
        raise ValueError(
            f"Layer '{given.name}', whose rows are candidates, is not built: "
            "call it before, or build it in `strategy.scope()`."
        )
    if not hasattr(given, "get_embedding_tables"):
        return whole_tables.kernel_of(given)
    tables = {
        config.table.name: feature.table for config, feature in given.lookups()
    }
    if table is None and len(tables) == 1:
        (table,) = tables
    if table not in tables:
        raise ValueError(
            f"Argument `table` must name one of the tables of layer "
            f"'{given.name}', {sorted(tables)}. Received: table={table!r}."
        )
    return given.table_variables()[tables[table]]


def _refuse_growing(variable: Any) -> None:
    if marks.keys_of(variable) is not None:
        raise ValueError(
            f"Table '{variable.name}' has a vocabulary that grows: rows "
            "without a key would be candidates too. Give the rows of its keys "
            "(`get_vocabularies`) as a tensor."
        )
