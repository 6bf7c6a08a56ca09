# SPDX-License-Identifier: Apache-2.0
"""Placements: the ranks of a table's parts, and the rows of each part."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

import numpy as np
import numpy.typing as npt

from tfdist_ext.tables import checks
from tfdist_ext.tables.checks import Storage
from tfdist_ext.tables.checks import refuse_removed

PlacementKind = Literal[
    "data_parallel", "table_wise", "row_wise", "column_wise", "grid"
]

# The planner's time and memory grow with the number of ranks.
MOST_RANKS = 1 << 14


@dataclasses.dataclass(frozen=True)
class TablePlacement:
    """The ranks of the parts of a table.

    A table is divided into `row_parts` x `column_parts` cells. Cell (i, j) is
    on `ranks[i * column_parts + j]`. Table-wise, row-wise and column-wise are
    the grids 1 x 1, W x 1 and 1 x W. A data-parallel table has no cells: it is
    on every rank.

    Attributes:
        row_parts: number of row parts (rotated modulo, see `part_of`).
        column_parts: number of contiguous ranges of columns.
        ranks: distinct ranks, one per cell; empty for data_parallel.
        deduplicate: whether a rank requests each unique row of its batch once
            and combines rows itself, instead of receiving combined rows from
            the owners.
        hot_ids: removed; must be empty.

    Raises:
        ValueError: ranks do not match the parts, or are repeated.
    """

    row_parts: int = 1
    column_parts: int = 1
    ranks: tuple[int, ...] = ()
    deduplicate: bool = False
    hot_ids: dataclasses.InitVar[object] = ()

    def __post_init__(self, hot_ids: object) -> None:
        refuse_removed("hot_ids", hot_ids, "a placement")
        self._check_types()
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

    def _check_types(self) -> None:
        """Converts NumPy's integers to int, and sequences to tuples."""
        where = "a placement"
        for field in ("row_parts", "column_parts"):
            parts = checks.integer(
                field, getattr(self, field), 1, where, MOST_RANKS
            )
            object.__setattr__(self, field, parts)
        checks.boolean("deduplicate", self.deduplicate, where, optional=False)
        ranks = [
            checks.integer("ranks", rank, 0, where, MOST_RANKS - 1)
            for rank in self.ranks
        ]
        object.__setattr__(self, "ranks", tuple(ranks))

    @classmethod
    def data_parallel(cls) -> TablePlacement:
        """The unpartitioned table on every rank."""
        return cls()

    @classmethod
    def table_wise(
        cls,
        rank: int = 0,
        deduplicate: bool = False,
        hot_ids: object = (),
    ) -> TablePlacement:
        """The unpartitioned table on one rank.

        Args:
            rank: number of the rank.
            deduplicate: see the class.
            hot_ids: removed; must be empty.
        """
        return cls(1, 1, (rank,), deduplicate, hot_ids)

    @classmethod
    def row_wise(
        cls,
        world_size: int,
        deduplicate: bool = False,
        hot_ids: object = (),
    ) -> TablePlacement:
        """Rows divided over all ranks.

        Args:
            world_size: number of ranks.
            deduplicate: see the class.
            hot_ids: removed; must be empty.
        """
        ranks = tuple(range(world_size))
        return cls(world_size, 1, ranks, deduplicate, hot_ids)

    @classmethod
    def column_wise(
        cls, world_size: int, deduplicate: bool = False
    ) -> TablePlacement:
        """Columns divided over all ranks.

        Args:
            world_size: number of ranks.
            deduplicate: see the class.
        """
        return cls.grid(1, world_size, deduplicate)

    @classmethod
    def grid(
        cls, row_parts: int, column_parts: int, deduplicate: bool = False
    ) -> TablePlacement:
        """Rows and columns divided over the first ranks.

        Args:
            row_parts: number of row parts.
            column_parts: number of ranges of columns.
            deduplicate: see the class.
        """
        ranks = tuple(range(row_parts * column_parts))
        return cls(row_parts, column_parts, ranks, deduplicate)

    @property
    def kind(self) -> PlacementKind:
        """The kind of placement by its usual name."""
        if not self.ranks:
            return "data_parallel"
        if len(self.ranks) == 1:
            return "table_wise"
        if self.column_parts == 1:
            return "row_wise"
        return "column_wise" if self.row_parts == 1 else "grid"


@dataclasses.dataclass(frozen=True)
class FeaturePlacement:
    """The placement of a feature's table, as the ops need it.

    Attributes:
        name: name of the feature, for error messages.
        vocabulary_size: rows of the entire table.
        dim: columns of the entire table.
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
    """The shard of a `[rows, dim]` table on one rank.

    Attributes:
        table: name of the table, for error messages.
        rows: rows of the entire table (`vocabulary_size`, `input_dim`).
        dim: columns of the entire table (`embedding_dim`, `units`).
        rank: rank of this shard.
        world_size: number of ranks.
        row_parts: see `TablePlacement`.
        column_parts: see `TablePlacement`.
        ranks: see `TablePlacement`. A rank that is not among them owns a block
            of 0 rows.
        grows: whether a checkpoint may have fewer rows, see
            `DynamicVocabulary`.
        storage: memory of variable and slots: "host", or "device", as for the
            rank's other weights: a GPU if the rank has one.

    Raises:
        ValueError: the table cannot be divided in this way.
    """

    table: str
    rows: int
    dim: int
    rank: int
    world_size: int
    row_parts: int
    column_parts: int
    ranks: tuple[int, ...]
    grows: bool = False
    storage: Storage = "host"

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
        grows: bool = False,
        storage: Storage = "host",
    ) -> ShardSpec:
        """The shard of `rank`; the entire table if data_parallel."""
        if not placement.ranks:
            return cls(table, rows, dim, 0, 1, 1, 1, (0,), grows, storage)
        return cls(
            table,
            rows,
            dim,
            rank,
            world_size,
            placement.row_parts,
            placement.column_parts,
            placement.ranks,
            grows,
            storage,
        )

    def __str__(self) -> str:
        """Describes the placement; the text is the same on all ranks."""
        return (
            f"table '{self.table}' [{self.rows}, {self.dim}] in "
            f"{self.row_parts} x {self.column_parts} parts on ranks "
            f"{list(self.ranks)}"
            + ", on GPUs"
            * (self.partitioned and self.storage == "device")
        )

    @property
    def partitioned(self) -> bool:
        """Whether some rank does not have the entire table."""
        return self.world_size > 1

    @property
    def cell(self) -> tuple[int, int] | None:
        """Row part and column part of this rank, None if it has no cell."""
        if self.rank not in self.ranks:
            return None
        return divmod(self.ranks.index(self.rank), self.column_parts)

    @property
    def local_rows(self) -> int:
        """Rows of this rank, rounded up so that row parts have equal sizes."""
        return -(-self.rows // self.row_parts) if self.cell else 0

    @property
    def columns(self) -> tuple[int, int]:
        """First column of this rank and the one after its last."""
        part = self.cell[1] if self.cell else 0
        return (
            part * self.dim // self.column_parts,
            (part + 1) * self.dim // self.column_parts,
        )

    @property
    def local_dim(self) -> int:
        """Number of columns of this rank."""
        first, end = self.columns
        return end - first

    @property
    def local_shape(self) -> tuple[int, int]:
        """Shape of the shard."""
        return self.local_rows, self.local_dim

    def at(self, rank: int) -> ShardSpec:
        """The shard of another rank."""
        return dataclasses.replace(self, rank=rank)

    @property
    def row_peers(self) -> tuple[int, ...]:
        """The ranks with columns of this rank's rows, including itself."""
        if self.cell is None:
            return ()
        first = self.cell[0] * self.column_parts
        return self.ranks[first : first + self.column_parts]


def spec_to_json(spec: ShardSpec | None) -> str:
    """A spec as text, for an attribute of an op; "" for None."""
    return "" if spec is None else json.dumps(dataclasses.asdict(spec))


def spec_from_json(text: str | bytes) -> ShardSpec | None:
    """The spec that `spec_to_json` wrote."""
    if not text:
        return None
    fields = json.loads(text)
    # Older exports have this field, which was removed; it must be empty.
    where = f"table '{fields['table']}'"
    refuse_removed("hot_ids", fields.pop("hot_ids", ()), where)
    # JSON has no tuples.
    fields.update(
        {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
    )
    return ShardSpec(**fields)


_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def local_row(ids: npt.ArrayLike, row_parts: int) -> npt.NDArray[np.int64]:
    """The row of each id within its row part.

    >>> local_row([0, 1, 2, 3, 4], row_parts=2).tolist()
    [0, 0, 1, 1, 2]

    Args:
        ids: non-negative integers, any shape.
        row_parts: number of row parts.

    Returns:
        int64 of the same shape.
    """
    return np.asarray(ids, np.int64) // row_parts


def part_of(ids: npt.ArrayLike, row_parts: int) -> npt.NDArray[np.int64]:
    """The row part of each id.

    >>> part_of([0, 1, 2, 3, 4], row_parts=2).tolist()
    [0, 1, 1, 0, 0]

    Args:
        ids: non-negative integers, any shape.
        row_parts: number of row parts.

    Returns:
        int64 of the same shape.
    """
    ids = np.asarray(ids, np.int64)
    return (ids + _rotation(ids // row_parts)) % row_parts


def ids_of_part(
    part: int,
    row_parts: int,
    rows: int,
    first: int = 0,
    end: int | None = None,
) -> npt.NDArray[np.int64]:
    """The ids of a row part, in the order of its local rows.

    >>> ids_of_part(0, row_parts=2, rows=5).tolist()
    [0, 3, 4]

    Args:
        part: number of the row part.
        row_parts: number of row parts.
        rows: rows of the entire table.
        first: first local row.
        end: local row after the last one, None for all.

    Returns:
        int64, one per local row. If a part has no row of an incomplete last
        block, its last local row is padding and has no id.
    """
    blocks = -(-rows // row_parts)
    last = blocks if end is None else min(end, blocks)
    ids = ids_at(np.arange(first, last), part, row_parts)
    return ids[ids < rows]


def ids_at(
    local_rows: npt.ArrayLike, part: int, row_parts: int
) -> npt.NDArray[np.int64]:
    """The ids of some local rows of a row part.

    >>> ids_at([0, 2], part=0, row_parts=2).tolist()
    [0, 4]

    Args:
        local_rows: non-negative integers, any shape.
        part: number of the row part.
        row_parts: number of row parts.

    Returns:
        int64 of the same shape; for padding, a number that is not below the
        table's rows.
    """
    block = np.asarray(local_rows, np.int64)
    return block * row_parts + (part - _rotation(block)) % row_parts


def _rotation(block: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    with np.errstate(over="ignore"):
        product = block.astype(np.uint64) * _MULTIPLIER
    return (product >> np.uint64(32)).astype(np.int64)
