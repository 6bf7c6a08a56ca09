# SPDX-License-Identifier: Apache-2.0
"""What one rank holds of a partitioned table, as plain data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from typing import Literal

PlacementKind = Literal[
    "data_parallel", "table_wise", "row_wise", "column_wise", "grid"
]


@dataclasses.dataclass(frozen=True)
class TablePlacement:
    """Which ranks hold which part of a table.

    A table is cut into `row_parts` x `column_parts` cells; cell (i, j) lies
    on `ranks[i * column_parts + j]`. Table-wise, row-wise and column-wise are
    the grids 1 x 1, W x 1 and 1 x W. A data-parallel table has no cells: it
    is on every rank.

    Attributes:
        row_parts: number of parts of the rows (rotated mod, `placement.py`).
        column_parts: number of contiguous ranges of columns.
        ranks: distinct ranks, one per cell; empty for data_parallel.
        deduplicate: a batch asks for each distinct row once and pools on its
            own rank, instead of pooled sums from the owners.

    Raises:
        ValueError: if ranks do not match the parts, or repeat.
    """

    row_parts: int = 1
    column_parts: int = 1
    ranks: tuple[int, ...] = ()
    deduplicate: bool = False

    def __post_init__(self) -> None:
        parts = (self.row_parts, self.column_parts)
        if not self.ranks and parts == (1, 1):
            return
        cells = self.row_parts * self.column_parts
        repeat = len(set(self.ranks)) < len(self.ranks)
        if min(parts) < 1 or len(self.ranks) != cells or repeat:
            raise ValueError(
                f"A placement of {self.row_parts} x {self.column_parts} parts "
                f"needs {cells} distinct ranks. Received: ranks={self.ranks}."
            )

    @classmethod
    def data_parallel(cls) -> TablePlacement:
        """The whole table on every rank."""
        return cls()

    @classmethod
    def table_wise(
        cls, rank: int = 0, deduplicate: bool = False
    ) -> TablePlacement:
        """The whole table on one rank."""
        return cls(1, 1, (rank,), deduplicate)

    @classmethod
    def row_wise(
        cls, world_size: int, deduplicate: bool = False
    ) -> TablePlacement:
        """Rows spread over all ranks."""
        return cls.grid(world_size, 1, deduplicate)

    @classmethod
    def column_wise(
        cls, world_size: int, deduplicate: bool = False
    ) -> TablePlacement:
        """Columns spread over all ranks."""
        return cls.grid(1, world_size, deduplicate)

    @classmethod
    def grid(
        cls, row_parts: int, column_parts: int, deduplicate: bool = False
    ) -> TablePlacement:
        """Rows and columns spread over the first ranks."""
        ranks = tuple(range(row_parts * column_parts))
        return cls(row_parts, column_parts, ranks, deduplicate)

    @property
    def kind(self) -> PlacementKind:
        """The sharding type in the field's words."""
        if not self.ranks:
            return "data_parallel"
        if len(self.ranks) == 1:
            return "table_wise"
        if self.column_parts == 1:
            return "row_wise"
        return "column_wise" if self.row_parts == 1 else "grid"


@dataclasses.dataclass(frozen=True)
class FeaturePlacement:
    """Where the rows of a feature's table live, as the ops need it.

    Attributes:
        name: of the feature, for messages.
        vocabulary_size: rows of the whole table.
        dim: columns of the whole table.
        row_parts: see `TablePlacement`.
        column_parts: see `TablePlacement`.
        ranks: see `TablePlacement`; not empty.
    """

    name: str
    vocabulary_size: int
    dim: int
    row_parts: int
    column_parts: int
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """The part of a `[rows, dim]` table that one rank holds.

    Attributes:
        table: name of the table, for messages.
        rows: rows of the whole table (`vocabulary_size`, `input_dim`).
        dim: columns of the whole table (`embedding_dim`, `units`).
        rank: the rank that holds this part.
        world_size: the number of ranks.
        row_parts: see `TablePlacement`.
        column_parts: see `TablePlacement`.
        ranks: see `TablePlacement`. A rank that is not among them holds
            nothing, a block of 0 rows.

    Raises:
        ValueError: on a table that cannot be cut this way.
    """

    table: str
    rows: int
    dim: int
    rank: int
    world_size: int
    row_parts: int
    column_parts: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dim < self.column_parts:
            raise ValueError(
                f"Table '{self.table}' has {self.dim} columns, fewer than "
                f"the {self.column_parts} parts they would be cut into. "
                "Place it by row."
            )
        if not all(0 <= rank < self.world_size for rank in self.ranks):
            raise ValueError(
                f"Table '{self.table}' is placed on ranks {self.ranks}, but "
                f"there are {self.world_size} ranks. Make a plan for "
                f"world_size={self.world_size}."
            )

    @classmethod
    def of(
        cls,
        table: str,
        rows: int,
        dim: int,
        placement: TablePlacement,
        rank: int,
        world_size: int,
    ) -> ShardSpec:
        """What `rank` holds of a table; all of it if data_parallel."""
        if not placement.ranks:
            return cls(table, rows, dim, 0, 1, 1, 1, (0,))
        return cls(
            table,
            rows,
            dim,
            rank,
            world_size,
            placement.row_parts,
            placement.column_parts,
            placement.ranks,
        )

    @property
    def partitioned(self) -> bool:
        """Whether some rank does not hold the whole table."""
        return self.world_size > 1

    @property
    def cell(self) -> tuple[int, int] | None:
        """Which row part and column part this rank holds, None if none."""
        if self.rank not in self.ranks:
            return None
        return divmod(self.ranks.index(self.rank), self.column_parts)

    @property
    def local_rows(self) -> int:
        """Rows this rank holds (rounded up to row parts of equal size)."""
        return -(-self.rows // self.row_parts) if self.cell else 0

    @property
    def columns(self) -> tuple[int, int]:
        """First column this rank holds and the one after the last."""
        part = self.cell[1] if self.cell else 0
        return (
            part * self.dim // self.column_parts,
            (part + 1) * self.dim // self.column_parts,
        )

    @property
    def local_dim(self) -> int:
        """Columns this rank holds."""
        first, end = self.columns
        return end - first

    @property
    def local_shape(self) -> tuple[int, int]:
        """Shape of the local part, `[local_rows, local_dim]`."""
        return self.local_rows, self.local_dim

    def at(self, rank: int) -> ShardSpec:
        """What another rank holds."""
        return dataclasses.replace(self, rank=rank)

    @property
    def row_peers(self) -> tuple[int, ...]:
        """The ranks that hold other columns of this rank's rows, and it."""
        if self.cell is None:
            return ()
        first = self.cell[0] * self.column_parts
        return self.ranks[first : first + self.column_parts]


def shard_spec(variable: Any) -> ShardSpec | None:
    """What a variable (TensorFlow's or Keras's) holds, None if no shard."""
    inner = getattr(variable, "_value", variable)
    return getattr(inner, "_tfdist_shard", None)


def spec_to_json(spec: ShardSpec | None) -> str:
    """A spec as text, for an attribute of an op; "" for None."""
    return "" if spec is None else json.dumps(dataclasses.asdict(spec))


def spec_from_json(text: str | bytes) -> ShardSpec | None:
    """The spec that `spec_to_json` wrote."""
    if not text:
        return None
    fields = json.loads(text)
    # JSON has no tuples.
    fields.update(
        {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
    )
    return ShardSpec(**fields)
