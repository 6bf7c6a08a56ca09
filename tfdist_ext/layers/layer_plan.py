# SPDX-License-Identifier: Apache-2.0
"""Plans as layers make them: for their ranks, wire, machine and batch."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence

from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.embedding.wire import Wire
from tfdist_ext.planner.plan import ShardingPlan
from tfdist_ext.planner.plan import plan
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.table_config import FeatureConfig


def make(
    features: Sequence[FeatureConfig],
    wire: Wire,
    collectives: Collectives,
    samples: int | None = None,
    forced: Mapping[str, TablePlacement | str] | None = None,
) -> ShardingPlan:
    """A plan for all tables that features look up in.

    Args:
        features: all.
        wire: how their numbers travel.
        collectives: of the strategy; knows what was measured, and the batch
            while one of Keras's loops runs.
        samples: of a rank in a step, if no loop tells; None if not known.
        forced: placements or kinds by table, before the tables' own.
    """
    loop, machine = collectives.loop, collectives.machine
    if loop is not None and loop.samples is not None:
        samples = loop.samples
    tables = {feature.table.name: feature.table for feature in features}
    return plan(
        list(tables.values()),
        features,
        collectives.group.world_size,
        batch_size=samples,
        wire_bytes=wire.bytes_of_number,
        forced=forced,
        **({} if machine is None else machine.speeds()),
    )
