# SPDX-License-Identifier: Apache-2.0
"""Plans as layers make them: for their ranks, wire, machine and batch."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence

from tfdist_ext.collectives import gpus
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.embedding.wire import Wire
from tfdist_ext.planner.plan import ShardingPlan
from tfdist_ext.planner.plan import plan
from tfdist_ext.tables import choices
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig


def make(
    features: Sequence[FeatureConfig],
    wire: Wire,
    collectives: Collectives,
    samples: int | None = None,
    forced: Mapping[str, TablePlacement | str] | None = None,
    device_memory: float | None = None,
) -> ShardingPlan:
    """A plan for all tables that features look up in.

    Args:
        features: all.
        wire: how their numbers travel.
        collectives: of the strategy; knows what was measured, and the batch
            while one of Keras's loops runs.
        samples: of a rank in a step, if no loop tells; None if not known.
        forced: placements or kinds by table, before the tables' own.
        device_memory: of each rank's GPU; None for what is left there.

    Raises:
        ValueError: a table was asked onto a GPU, and some rank has none, or
            too little memory on it.
    """
    loop, machine = collectives.loop, collectives.machine
    if loop is not None and loop.samples is not None:
        samples = loop.samples
    if device_memory is None:
        device_memory = collectives.gpus.memory
    tables = {feature.table.name: feature.table for feature in features}
    for table in tables.values():
        if table.storage == "device":
            _check_gpu(table, collectives)
    return plan(
        list(tables.values()),
        features,
        collectives.group.world_size,
        batch_size=samples,
        wire_bytes=wire.bytes_of_number,
        device_memory=device_memory,
        forced=forced,
        **({} if machine is None else machine.speeds()),
    )


def storage_of(
    table: TableConfig,
    placement: TablePlacement,
    plan: ShardingPlan | None,
    collectives: Collectives | None,
) -> choices.Storage:
    """Where a table lies: as it was asked for, or as a plan has decided.

    Without either parts lie on the hosts, and what a rank has whole lies
    where its other weights do.

    Args:
        table: which.
        placement: of the table.
        plan: with the table; None without one.
        collectives: of the strategy; None in one process.

    Raises:
        ValueError: on a GPU, and some rank has none.
    """
    found = table.storage
    if found is None:
        if plan is None or plan.problem.setting.device_memory is None:
            parts = collectives is not None and bool(placement.ranks)
            return "host" if parts else "device"
        found = plan.storage_of(table.name)
    if found == "device":
        _check_gpu(table, collectives)
    return found


def _check_gpu(table: TableConfig, collectives: Collectives | None) -> None:
    reason = _why_no_gpu(collectives)
    if reason:
        raise ValueError(
            f"Table {table.name!r} is to lie on a GPU, and there is none for "
            f"it: {reason}. Received: storage={table.storage!r}. Leave "
            "`storage` out, or use storage='host'; make a plan without "
            "`device_memory`."
        )


def _why_no_gpu(collectives: Collectives | None) -> str:
    if collectives is not None:
        return collectives.gpus.reason
    return "" if gpus.visible_device() is not None else gpus.NO_GPU
