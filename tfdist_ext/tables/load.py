# SPDX-License-Identifier: Apache-2.0
"""The load of each rank in a plan: bytes, seconds and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tfdist_ext.tables.checks import Storage
from tfdist_ext.tables.cost import Costs
from tfdist_ext.tables.cost import Floats
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.problem import Problem
from tfdist_ext.tables.problem import Setting
from tfdist_ext.tables.problem import TableNumbers

# The three exchanges are of ids, results and gradients. Each sends a frame with
# a header to every peer.
_EXCHANGES = 3
_FRAME_BYTES = 140
_EXCHANGE_SECONDS = 200e-6
_PEER_SECONDS = 20e-6


@dataclasses.dataclass(frozen=True)
class Load:
    """Load of the ranks, numbers or arrays `[W]`.

    Attributes:
        ids: bytes of ids sent.
        results: bytes of results and gradients sent.
        received: bytes received.
        seconds: seconds of computing.
        lookups: bytes of rows read for results.
        memory: bytes of weights and slots.
    """

    ids: Any = 0.0
    results: Any = 0.0
    received: Any = 0.0
    seconds: Any = 0.0
    lookups: Any = 0.0
    memory: Any = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(
            *(
                getattr(self, field.name) + getattr(other, field.name)
                for field in dataclasses.fields(self)
            )
        )

    @property
    def sent(self) -> Any:
        """Bytes sent."""
        return self.ids + self.results

    def transfer(self, setting: Setting) -> Any:
        """Seconds of transfers."""
        moved = np.maximum(self.sent, self.received)
        return moved / setting.link_bytes_per_second

    def time(self, setting: Setting) -> Any:
        """Seconds of transfers and of computing."""
        return self.transfer(setting) + self.seconds


def load_without_cells(costs: Costs) -> Load:
    """Load by a table of a rank that has no cell of it."""
    return Load(
        ids=costs.ids,
        results=costs.results,
        received=costs.results,
        seconds=costs.seconds,
        lookups=costs.lookups,
        memory=costs.memory,
    )


def load_of_cells(
    costs: Costs, cells: Any, columns: Any, setting: Setting
) -> Load:
    """Load that cells add to a rank.

    Args:
        costs: costs of the table.
        cells: number of cells (a mean over ranks may be fractional).
        columns: total number of columns of these cells.
        setting: setting of the plan.
    """
    peers = setting.world_size - 1
    # A rank does not use the network for its own cells.
    own = (peers - 1) * costs.part_results * columns
    return Load(
        ids=-costs.part_ids * cells,
        results=own,
        received=peers * costs.part_ids * cells + own,
        seconds=costs.cell_seconds * cells + costs.column_seconds * columns,
        lookups=costs.column_lookups * columns,
        memory=costs.cell_memory * cells + costs.column_memory * columns,
    )


def load_of_placement(
    costs: Costs, dim: int, placement: TablePlacement, setting: Setting
) -> Load:
    """Load of all ranks, `[W]`, from one table.

    Args:
        costs: costs of the table in the placement's shape.
        dim: columns of the table.
        placement: placement of the table.
        setting: setting of the plan.
    """
    cells = np.zeros(setting.world_size)
    columns = np.zeros(setting.world_size)
    for cell, rank in enumerate(placement.ranks):
        part = cell % placement.column_parts
        cells[rank] = 1
        columns[rank] = width(dim, placement.column_parts, part)
    held = load_of_cells(costs, cells, columns, setting)
    return load_without_cells(costs) + held


def load_of_exchanges(setting: Setting) -> Load:
    """Fixed cost of a plan's exchanges for a rank, without their contents."""
    peers = setting.world_size - 1
    frames = _EXCHANGES * _FRAME_BYTES * peers
    latency = _EXCHANGES * (_EXCHANGE_SECONDS + _PEER_SECONDS * peers)
    return Load(
        results=frames, received=frames, seconds=latency if peers else 0.0
    )


def width(dim: int, column_parts: int, part: int) -> int:
    """Columns of a column part."""
    return (part + 1) * dim // column_parts - part * dim // column_parts


_FIELDS = tuple(field.name for field in dataclasses.fields(Load))
_MEMORY = _FIELDS.index("memory")
# Exceeds the load of any rank.
_FULL = 1e18


class RankLoads:
    """Loads of all ranks, to which tables are added one by one.

    Args:
        costs: costs of every table in its chosen shape, `[tables]` each.
        dims: columns of every table.
        setting: setting of the plan.
        effort: weight of a second of computing relative to one of transfers.
        by_memory: whether to balance memory instead of time, without a limit.
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
        cell = load_of_cells(costs, 1.0, 0.0, setting)
        column = load_of_cells(costs, 0.0, 1.0, setting)
        everyone = load_without_cells(costs)
        self._everyone = _columns(everyone, len(dims)).sum(0)
        self._cell = _columns(cell, len(dims))
        self._column = _columns(column, len(dims))
        self._held = np.zeros((setting.world_size, len(_FIELDS)))
        # Ranks are compared by the load of cells; the rest is the same on all
        # ranks.
        self._weights = np.zeros(setting.world_size)
        link = setting.link_bytes_per_second

        def weight(load: Load) -> Floats:
            if by_memory:
                return np.asarray(load.memory)
            # Received ids count: they are more than the ids that the cell's
            # rank does not send.
            return np.asarray(load.received / link + effort * load.seconds)

        self._cell_weight = weight(cell)
        self._column_weight = weight(column)

    def hold(self, table: int, ranks: Sequence[int], column_parts: int) -> None:
        """Adds the cells of a table to these ranks, if any."""
        if not ranks:
            return
        self._put(
            table, np.array(ranks, np.int64), self._widths(table, column_parts)
        )

    def hold_evenly(self, table: int, column_parts: int) -> None:
        """Adds an equal cell of a table to every rank."""
        columns = self._dims[table] // column_parts
        self._everyone += self._cell[table] + columns * self._column[table]

    def take(
        self, table: int, row_parts: int, column_parts: int
    ) -> tuple[int, ...]:
        """Adds a table's cells to the least loaded ranks with free memory.

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
            # If no rank has free memory, the plan will be rejected, but it must
            # still be complete.
            weights = np.where(used <= self._limit, weights, weights + _FULL)
        if count == 1:
            ranks = np.array([weights.argmin()])
        elif widths.min() == widths.max():
            ranks = np.sort(np.argsort(weights, kind="stable")[:count])
        else:
            # The widest cells get the least loaded ranks.
            cells = np.argsort(-np.tile(widths, row_parts), kind="stable")
            ranks = np.empty(count, np.int64)
            ranks[cells] = np.argsort(weights, kind="stable")[:count]
        self._put(table, ranks, widths)
        return tuple(ranks.tolist())

    def load(self) -> Load:
        """The load of every rank, `[W]`."""
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


def is_storage_decided(problem: Problem) -> bool:
    """Whether storage must be decided; otherwise all tables are on hosts."""
    return problem.setting.device_memory is not None or any(
        table.storage == "device" for table in problem.tables
    )


def decide_storage(
    problem: Problem, loads: Mapping[str, Load]
) -> dict[str, Storage]:
    """Storage of each table, by name.

    Args:
        problem: tables with their requests, and the memory of GPUs.
        loads: load by each table in its placement, arrays `[W]`.

    Raises:
        ValueError: a GPU is requested, and there is none, or too little memory
            on it.
    """
    limit = problem.setting.device_memory
    storages: dict[str, Storage] = {t.name: "host" for t in problem.tables}
    taken = np.zeros(problem.setting.world_size)
    for table in sorted(problem.tables, key=lambda t: _order(t, loads)):
        asked = table.storage == "device"
        if asked and limit is None:
            raise ValueError(
                f"Table {table.name!r} has storage='device', but the plan is "
                "for ranks without GPUs. Received: storage='device', "
                "device_memory=None. Leave `storage` out, or set "
                "`device_memory`, the bytes of a rank's GPU that tables may "
                "have."
            )
        if table.storage == "host" or limit is None:
            continue
        full = taken + loads[table.name].memory
        if np.max(full) <= limit:
            taken, storages[table.name] = full, "device"
        elif asked:
            raise ValueError(
                "The tables with storage='device' do not fit on GPUs: with "
                f"{table.name!r} the fullest of {len(taken)} ranks needs "
                f"{np.max(full):,.0f} bytes for weights and slots. Received: "
                f"storage='device', device_memory={limit:,.0f}. Leave "
                "`storage` out of some of them, or use more ranks or "
                "dtype='bfloat16'."
            )
    return storages


def _order(
    table: TableNumbers, loads: Mapping[str, Load]
) -> tuple[bool, float]:
    load = loads[table.name]
    return table.storage != "device", -float(
        np.sum(load.lookups) / max(float(np.sum(load.memory)), 1.0)
    )
