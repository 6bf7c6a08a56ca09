# SPDX-License-Identifier: Apache-2.0
"""Where the parts of a table are, and which rows each part holds."""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from typing import Literal

import numpy as np
import numpy.typing as npt

from tfdist_ext.tables import checks
from tfdist_ext.tables.checks import Storage
from tfdist_ext.tables.checks import refuse_removed

PlacementKind = Literal[
    "data_parallel", "table_wise", "row_wise", "column_wise", "grid"
]

# The planner's time and memory grow with the ranks.
MOST_RANKS = 1 << 14


@dataclasses.dataclass(frozen=True)
class TablePlacement:
    """Which ranks hold which part of a table.

    A table is cut into `row_parts` x `column_parts` cells; cell (i, j) is
    on `ranks[i * column_parts + j]`. Table-wise, row-wise and column-wise are
    the grids 1 x 1, W x 1 and 1 x W. A data-parallel table has no cells: it
    is on every rank.

    Attributes:
        row_parts: number of parts of the rows (rotated mod, `part_of`).
        column_parts: number of contiguous ranges of columns.
        ranks: distinct ranks, one per cell; empty for data_parallel.
        deduplicate: a batch asks for each unique row once and pools on its
            own rank, instead of pooled sums from the owners.
        hot_ids: removed, refused unless there are none.

    Raises:
        ValueError: if ranks do not match the parts, or repeat.
    """

    row_parts: int = 1
    column_parts: int = 1
    ranks: tuple[int, ...] = ()
    deduplicate: bool = False
    hot_ids: dataclasses.InitVar[Any] = ()

    def __post_init__(self, hot_ids: Any) -> None:
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
        """Makes numbers of what may be NumPy's, and tuples of sequences."""
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
        """The whole table on every rank."""
        return cls()

    @classmethod
    def table_wise(
        cls,
        rank: int = 0,
        deduplicate: bool = False,
        hot_ids: Any = (),
    ) -> TablePlacement:
        """The whole table on one rank.

        Args:
            rank: which one.
            deduplicate: see the class.
            hot_ids: removed, refused unless empty.
        """
        return cls(1, 1, (rank,), deduplicate, hot_ids)

    @classmethod
    def row_wise(
        cls,
        world_size: int,
        deduplicate: bool = False,
        hot_ids: Any = (),
    ) -> TablePlacement:
        """Rows spread over all ranks.

        Args:
            world_size: number of ranks.
            deduplicate: see the class.
            hot_ids: removed, refused unless empty.
        """
        ranks = tuple(range(world_size))
        return cls(world_size, 1, ranks, deduplicate, hot_ids)

    @classmethod
    def column_wise(
        cls, world_size: int, deduplicate: bool = False
    ) -> TablePlacement:
        """Columns spread over all ranks.

        Args:
            world_size: number of ranks.
            deduplicate: see the class.
        """
        return cls.grid(1, world_size, deduplicate)

    @classmethod
    def grid(
        cls, row_parts: int, column_parts: int, deduplicate: bool = False
    ) -> TablePlacement:
        """Rows and columns spread over the first ranks.

        Args:
            row_parts: number of parts of the rows.
            column_parts: number of ranges of columns.
            deduplicate: see the class.
        """
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
        ranks: see `TablePlacement`. A rank that is not among them owns
            nothing, a block of 0 rows.
        grows: whether a checkpoint may hold fewer rows, see
            `DynamicVocabulary`.
        storage: where variable and slots lie, "host" or "device": where the
            rank's other weights do, a GPU if it has one.

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
        """What `rank` holds of a table; all of it if data_parallel."""
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
        """The whole table, equal on all ranks that place it alike."""
        return (
            f"table '{self.table}' [{self.rows}, {self.dim}] in "
            f"{self.row_parts} x {self.column_parts} parts on ranks "
            f"{list(self.ranks)}"
            + ", on GPUs"
            * (self.partitioned and self.storage == "device")
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
        """Rows this rank owns (rounded up to row parts of equal size)."""
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
        """Shape of the local part."""
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


def spec_to_json(spec: ShardSpec | None) -> str:
    """A spec as text, for an attribute of an op; "" for None."""
    return "" if spec is None else json.dumps(dataclasses.asdict(spec))


def spec_from_json(text: str | bytes) -> ShardSpec | None:
    """The spec that `spec_to_json` wrote."""
    if not text:
        return None
    fields = json.loads(text)
    # Exports from before they were removed say that there are none.
    where = f"table '{fields['table']}'"
    refuse_removed("hot_ids", fields.pop("hot_ids", ()), where)
    # JSON has no tuples.
    fields.update(
        {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
    )
    return ShardSpec(**fields)


_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def local_row(ids: npt.ArrayLike, row_parts: int) -> npt.NDArray[np.int64]:
    """The row of each id within its part.

    >>> local_row([0, 1, 2, 3, 4], row_parts=2).tolist()
    [0, 0, 1, 1, 2]

    Args:
        ids: non-negative integers, any shape.
        row_parts: number of parts of the rows.

    Returns:
        int64 of the same shape.
    """
    return np.asarray(ids, np.int64) // row_parts


def part_of(ids: npt.ArrayLike, row_parts: int) -> npt.NDArray[np.int64]:
    """The part that holds the row of each id.

    >>> part_of([0, 1, 2, 3, 4], row_parts=2).tolist()
    [0, 1, 1, 0, 0]

    Args:
        ids: non-negative integers, any shape.
        row_parts: number of parts of the rows.

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
    """The ids of a part, in the order of its local rows.

    >>> ids_of_part(0, row_parts=2, rows=5).tolist()
    [0, 3, 4]

    Args:
        part: which one.
        row_parts: number of parts of the rows.
        rows: rows of the whole table.
        first: the local row to begin with.
        end: the local row to end before, None for all.

    Returns:
        int64, one per local row; the last local row is padding, without an id,
        in parts that have no row of an incomplete last block.
    """
    blocks = -(-rows // row_parts)
    last = blocks if end is None else min(end, blocks)
    ids = ids_at(np.arange(first, last), part, row_parts)
    return ids[ids < rows]


def ids_at(
    local_rows: npt.ArrayLike, part: int, row_parts: int
) -> npt.NDArray[np.int64]:
    """The ids that have these local rows of a part.

    >>> ids_at([0, 2], part=0, row_parts=2).tolist()
    [0, 4]

    Args:
        local_rows: non-negative integers, any shape.
        part: which one.
        row_parts: number of parts of the rows.

    Returns:
        int64 of the same shape; that of padding is not below the table's rows.
    """
    block = np.asarray(local_rows, np.int64)
    return block * row_parts + (part - _rotation(block)) % row_parts


def _rotation(block: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    with np.errstate(over="ignore"):
        product = block.astype(np.uint64) * _MULTIPLIER
    return (product >> np.uint64(32)).astype(np.int64)
