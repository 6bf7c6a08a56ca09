# SPDX-License-Identifier: Apache-2.0
"""Where tables lie, as the attributes that all ops of an exchange take.

`custom_ops/embedding/placement_plan.h` reads and checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist_ext.tables.placement import FeaturePlacement

_NAMES = (
    "world_size",
    "features",
    "vocabulary_sizes",
    "dims",
    "row_parts",
    "column_parts",
    "ranks",
)


def placement_attributes(
    placements: Sequence[FeaturePlacement], world_size: int
) -> dict[str, Any]:
    """Attributes by their names.

    Args:
        placements: of every feature.
        world_size: number of ranks.
    """
    values = (
        world_size,
        [each.name for each in placements],
        [each.vocabulary_size for each in placements],
        [each.dim for each in placements],
        [each.row_parts for each in placements],
        [each.column_parts for each in placements],
        [rank for each in placements for rank in each.ranks],
    )
    return dict(zip(_NAMES, values, strict=True))


def same_placement_as(op: Any) -> dict[str, Any]:
    """The attributes of an op, for that of its gradient."""
    return {name: op.get_attr(name) for name in _NAMES}
