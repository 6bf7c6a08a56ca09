# SPDX-License-Identifier: Apache-2.0
"""What placements load each rank with, from the costs of `cost.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdist_ext.planner.cost import Costs
from tfdist_ext.planner.problem import Setting
from tfdist_ext.tables.placement import TablePlacement

# Ids, results, gradients; per exchange a frame with its header to each peer.
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
        seconds: of computing.
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
    """What a table costs a rank that holds no cell of it."""
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
    """What holding cells adds to a rank.

    Args:
        costs: of the table.
        cells: number of cells (a mean over ranks need not be whole).
        columns: of these cells together.
        setting: of the plan.
    """
    peers = setting.world_size - 1
    # Its own cells answer a rank without the network.
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
        costs: of the table in the placement's shape.
        dim: columns of the table.
        placement: of the table.
        setting: of the plan.
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
    """What the exchanges of a plan cost a rank, whatever travels in them."""
    peers = setting.world_size - 1
    frames = _EXCHANGES * _FRAME_BYTES * peers
    latency = _EXCHANGES * (_EXCHANGE_SECONDS + _PEER_SECONDS * peers)
    return Load(
        results=frames, received=frames, seconds=latency if peers else 0.0
    )


def width(dim: int, column_parts: int, part: int) -> int:
    """Columns of a column part."""
    return (part + 1) * dim // column_parts - part * dim // column_parts
