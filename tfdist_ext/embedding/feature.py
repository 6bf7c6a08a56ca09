# SPDX-License-Identifier: Apache-2.0
"""What is looked up: a feature's ids, and the table behind it."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist_ext.tables.choices import Combiner
from tfdist_ext.tables.choices import OutOfRange
from tfdist_ext.tables.placement import FeaturePlacement
from tfdist_ext.tables.shard_spec import ShardSpec


@dataclasses.dataclass(frozen=True)
class Feature:
    """A column of the input that is looked up in a table.

    Attributes:
        name: for messages.
        table: index of the table among those of the lookup.
        spec: the part of that table this rank holds.
        combiner: what happens to the rows of a sample.
        out_of_range: what an id outside of the table does.
        unique: whether unique rows travel, not sums of rows.
        keys: `KeyShard` of a table whose vocabulary grows, None of others.
    """

    name: str
    table: int
    spec: ShardSpec
    combiner: Combiner = "sum"
    out_of_range: OutOfRange = "error"
    unique: bool = False
    keys: Any = None

    @property
    def placement(self) -> FeaturePlacement:
        """Where the rows live, as the ops need it."""
        return FeaturePlacement(
            self.name,
            self.spec.rows,
            self.spec.dim,
            self.spec.row_parts,
            self.spec.column_parts,
            self.spec.ranks,
        )
