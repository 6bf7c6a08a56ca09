# SPDX-License-Identifier: Apache-2.0
"""What one rank holds of a partitioned table, as plain data."""

from __future__ import annotations

import dataclasses
import json

from tfdist_ext.tables.choices import Storage
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.removed import refuse_removed


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
