# SPDX-License-Identifier: Apache-2.0
"""What the ranks hold while a plan is made, and where there is room."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tfdist_ext.planner import load as load_lib
from tfdist_ext.planner.cost import Costs
from tfdist_ext.planner.cost import Floats
from tfdist_ext.planner.load import Load
from tfdist_ext.planner.problem import Setting

_FIELDS = tuple(field.name for field in dataclasses.fields(Load))
_MEMORY = _FIELDS.index("memory")
# More than any rank has to do.
_FULL = 1e18


class RankLoads:
    """Loads of all ranks; tables are put on them one by one.

    Args:
        costs: of every table in its chosen shape, `[tables]` each.
        dims: columns of every table.
        setting: of the plan.
        effort: what a second of computing counts against one of transfers.
        by_memory: even out memory instead of time, whatever the limit.
    """

    def __init__(
        self,
        costs: Costs,
        dims: Sequence[int],
        setting: Setting,
        effort: float,
        by_memory: bool,
    ) -> None:
        self._dims = dims
        self._limit = None if by_memory else setting.memory_limit
        cell = load_lib.load_of_cells(costs, 1.0, 0.0, setting)
        column = load_lib.load_of_cells(costs, 0.0, 1.0, setting)
        everyone = load_lib.load_without_cells(costs)
        self._everyone = _columns(everyone, len(dims)).sum(0)
        self._cell = _columns(cell, len(dims))
        self._column = _columns(column, len(dims))
        self._held = np.zeros((setting.world_size, len(_FIELDS)))
        # What ranks are compared by: of cells alone, the rest is the same.
        self._weights = np.zeros(setting.world_size)
        link = setting.link_bytes_per_second

        def weight(load: Load) -> Floats:
            if by_memory:
                return np.asarray(load.memory)
            # Ids are received, and more of them than the cell saves sending.
            return np.asarray(load.received / link + effort * load.seconds)

        self._cell_weight = weight(cell)
        self._column_weight = weight(column)

    def hold(self, table: int, ranks: Sequence[int], column_parts: int) -> None:
        """Puts the cells of a table on these ranks, if any."""
        if not ranks:
            return
        self._put(
            table, np.array(ranks, np.int64), self._widths(table, column_parts)
        )

    def hold_evenly(self, table: int, column_parts: int) -> None:
        """Puts an equal cell of a table on every rank."""
        columns = self._dims[table] // column_parts
        self._everyone += self._cell[table] + columns * self._column[table]

    def take(
        self, table: int, row_parts: int, column_parts: int
    ) -> tuple[int, ...]:
        """Puts a table's cells on the least loaded ranks with room.

        Returns:
            The rank of each cell.
        """
        widths = self._widths(table, column_parts)
        count = row_parts * column_parts
        weights = self._weights
        if self._limit is not None:
            used = self._held[:, _MEMORY] + self._everyone[_MEMORY]
            used = used + self._cell[table, _MEMORY]
            used = used + widths.max() * self._column[table, _MEMORY]
            # Without room anywhere this plan is lost, but must be one.
            weights = np.where(used <= self._limit, weights, weights + _FULL)
        if count == 1:
            ranks = np.array([weights.argmin()])
        elif widths.min() == widths.max():
            ranks = np.sort(np.argsort(weights, kind="stable")[:count])
        else:
            # The widest cells to the least loaded ranks.
            cells = np.argsort(-np.tile(widths, row_parts), kind="stable")
            ranks = np.empty(count, np.int64)
            ranks[cells] = np.argsort(weights, kind="stable")[:count]
        self._put(table, ranks, widths)
        return tuple(ranks.tolist())

    def load(self) -> Load:
        """What every rank has, `[W]`."""
        return Load(*(self._held + self._everyone).T)

    def _widths(self, table: int, column_parts: int) -> npt.NDArray[np.int64]:
        ends = np.arange(column_parts + 1) * self._dims[table] // column_parts
        return np.diff(ends)

    def _put(
        self,
        table: int,
        ranks: npt.NDArray[np.int64],
        widths: npt.NDArray[np.int64],
    ) -> None:
        columns = np.tile(widths, len(ranks) // len(widths))
        added = columns[:, None] * self._column[table]
        self._held[ranks] += self._cell[table] + added
        weight = self._cell_weight[table]
        self._weights[ranks] += weight + columns * self._column_weight[table]


def _columns(load: Load, tables: int) -> Floats:
    """A load of `[tables]` as `[tables, fields]`."""
    return np.stack(
        [np.broadcast_to(getattr(load, name), tables) for name in _FIELDS], 1
    )
