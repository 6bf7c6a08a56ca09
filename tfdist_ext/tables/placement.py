# SPDX-License-Identifier: Apache-2.0
"""Where the parts of a table lie, as plain data."""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Literal

from tfdist_ext.tables import checks
from tfdist_ext.tables.removed import refuse_removed

PlacementKind = Literal[
    "data_parallel", "table_wise", "row_wise", "column_wise", "grid"
]

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
        row_parts: number of parts of the rows (rotated mod, `rotated_mod.py`).
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
