# SPDX-License-Identifier: Apache-2.0
"""What one rank holds of a partitioned table, as plain data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any
from typing import Literal

from tfdist_ext.sharding import checks

PlacementKind = Literal[
    "data_parallel", "table_wise", "row_wise", "column_wise", "grid"
]

# The ops keep the index of a hot row in 16 bits.
MOST_HOT_ROWS = 1 << 16
# The planner's time and memory grow with the ranks.
MOST_RANKS = 1 << 14


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
        hot_ids: ids whose rows every rank holds besides; given in any order,
            kept ascending. Their rows must not be cut into columns.

    Raises:
        ValueError: if ranks do not match the parts, or repeat, or for hot
            ids that cannot be.
    """

    row_parts: int = 1
    column_parts: int = 1
    ranks: tuple[int, ...] = ()
    deduplicate: bool = False
    hot_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_types()
        if self.hot_ids:
            self._check_hot_ids()
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
        ids = [checks.integer("hot_ids", i, 0, where) for i in self.hot_ids]
        object.__setattr__(self, "hot_ids", tuple(sorted(ids)))

    def _check_hot_ids(self) -> None:
        if not self.ranks or self.column_parts > 1:
            raise ValueError(
                "Hot rows need a table whose rows are partitioned and not cut "
                f"into columns. Received: {len(self.hot_ids)} hot_ids, "
                f"row_parts={self.row_parts}, column_parts="
                f"{self.column_parts}, ranks={self.ranks}. Place it row_wise "
                "or table_wise, or leave the hot rows out."
            )
        distinct = len(set(self.hot_ids))
        if distinct < len(self.hot_ids) or distinct > MOST_HOT_ROWS:
            raise ValueError(
                f"Hot ids must be distinct and at most {MOST_HOT_ROWS}. "
                f"Received: {len(self.hot_ids)}, {distinct} of them distinct."
            )

    @classmethod
    def data_parallel(cls) -> TablePlacement:
        """The whole table on every rank."""
        return cls()

    @classmethod
    def table_wise(
        cls,
        rank: int = 0,
        deduplicate: bool = False,
        hot_ids: Iterable[int] = (),
    ) -> TablePlacement:
        """The whole table on one rank."""
        return cls(1, 1, (rank,), deduplicate, tuple(hot_ids))

    @classmethod
    def row_wise(
        cls,
        world_size: int,
        deduplicate: bool = False,
        hot_ids: Iterable[int] = (),
    ) -> TablePlacement:
        """Rows spread over all ranks."""
        ranks = tuple(range(world_size))
        return cls(world_size, 1, ranks, deduplicate, tuple(hot_ids))

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
        ranks: see `TablePlacement`. A rank that is not among them owns
            nothing, a block of 0 rows.
        hot_ids: see `TablePlacement`. Their rows lie behind the rank's own,
            in this order. Of a hot row that the rank owns as well, the copy
            there is the one that is trained.

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
    hot_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_hot_ids(self.hot_ids, self.rows, self.table)
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
            placement.hot_ids,
        )

    def __str__(self) -> str:
        """The whole table, equal on all ranks that place it alike."""
        text = (
            f"table '{self.table}' [{self.rows}, {self.dim}] in "
            f"{self.row_parts} x {self.column_parts} parts on ranks "
            f"{list(self.ranks)}"
        )
        if self.hot_ids:
            digest = hashlib.blake2b(repr(self.hot_ids).encode(), digest_size=4)
            text += (
                f", {len(self.hot_ids)} hot ids of hash {digest.hexdigest()}"
            )
        return text

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
        """Shape of the local part: the rows it owns, then the hot ones."""
        return self.local_rows + len(self.hot_ids), self.local_dim

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


def check_hot_ids(hot_ids: tuple[int, ...], rows: int, table: str) -> None:
    """Refuses ascending ids that a table does not have.

    Raises:
        ValueError: then.
    """
    if hot_ids and not 0 <= hot_ids[0] <= hot_ids[-1] < rows:
        raise ValueError(
            f"Table '{table}' has ids 0 to {rows - 1}. Received: hot ids from "
            f"{hot_ids[0]} to {hot_ids[-1]}."
        )


def shard_spec(variable: Any) -> ShardSpec | None:
    """What a variable (TensorFlow's or Keras's) holds, None if no shard."""
    for _ in range(2):
        # A distributed variable asks its value for what it has not itself,
        # and a summed one (a metric of tf_keras) gets that by an exchange.
        if variable is None or hasattr(type(variable), "_get_cross_replica"):
            return None
        if "_tfdist_shard" in getattr(variable, "__dict__", ()):
            break
        variable = getattr(variable, "_value", None)
    return getattr(variable, "_tfdist_shard", None)


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
