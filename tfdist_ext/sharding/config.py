# SPDX-License-Identifier: Apache-2.0
"""What one rank holds of a partitioned table, as plain data."""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Literal

Placement = Literal["row", "column"]


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """The part of a `[rows, dim]` table that one rank owns.

    Attributes:
        table: name of the table, for messages.
        rows: rows of the whole table (the layer's `input_dim`).
        dim: columns of the whole table (the layer's `units`).
        placement: "row" (every rank owns whole rows, spread by rotated mod,
            see `placement.py`) or "column" (every rank owns a contiguous
            range of columns of all rows).
        rank: the rank that owns this part.
        world_size: the number of ranks that share the table.

    Raises:
        ValueError: on a table that cannot be cut this way.
    """

    table: str
    rows: int
    dim: int
    placement: Placement
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.placement not in ("row", "column"):
            raise ValueError(
                f"Table '{self.table}': `placement` must be 'row' or "
                f"'column'. Received: placement={self.placement!r}."
            )
        if self.placement == "column" and self.dim < self.world_size:
            raise ValueError(
                f"Table '{self.table}' has {self.dim} columns, fewer than "
                f"the {self.world_size} ranks that would share them. Use "
                "sharding='row'."
            )

    @property
    def local_rows(self) -> int:
        """Rows this rank holds (row placement rounds up to equal shards)."""
        if self.placement == "column":
            return self.rows
        return -(-self.rows // self.world_size)

    @property
    def columns(self) -> tuple[int, int]:
        """First column this rank holds and the one after the last."""
        if self.placement == "row":
            return 0, self.dim
        return (
            self.rank * self.dim // self.world_size,
            (self.rank + 1) * self.dim // self.world_size,
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

    def dims_of(self, rank: int) -> int:
        """Columns that `rank` holds."""
        return dataclasses.replace(self, rank=rank).local_dim


def shard_spec(variable: Any) -> ShardSpec | None:
    """What a variable (TensorFlow's or Keras's) holds, None if no shard."""
    inner = getattr(variable, "_value", variable)
    return getattr(inner, "_tfdist_shard", None)
