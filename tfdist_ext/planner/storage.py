# SPDX-License-Identifier: Apache-2.0
"""Which tables lie on the ranks' GPUs, and which in their hosts' memory.

A table lies alike on all its ranks. Those that were asked onto a GPU go there
first. Of the others, the one of whose bytes a step reads the largest share
goes next, as long as it fits on every rank beside those before; one that does
not fit is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tfdist_ext.planner.load import Load
from tfdist_ext.planner.problem import Problem
from tfdist_ext.planner.problem import TableNumbers
from tfdist_ext.tables.choices import Storage


def is_decided(problem: Problem) -> bool:
    """Whether there is more to it than that all tables are on the hosts."""
    return problem.setting.device_memory is not None or any(
        table.storage == "device" for table in problem.tables
    )


def decide(problem: Problem, loads: Mapping[str, Load]) -> dict[str, Storage]:
    """Where each table lies, by name.

    Args:
        problem: the tables, what was asked of them and the GPUs' memory.
        loads: of each table as it is placed, arrays `[W]`.

    Raises:
        ValueError: if a GPU was asked for and there is none, or too little
            memory on it.
    """
    limit = problem.setting.device_memory
    storages: dict[str, Storage] = {t.name: "host" for t in problem.tables}
    taken = np.zeros(problem.setting.world_size)
    for table in sorted(problem.tables, key=lambda t: _order(t, loads)):
        asked = table.storage == "device"
        if asked and limit is None:
            raise ValueError(
                f"Table {table.name!r} is to lie on GPUs, and the plan is for "
                "ranks without. Received: storage='device', device_memory="
                "None. Leave `storage` out, or tell `device_memory`, the "
                "bytes of a rank's GPU that tables may have."
            )
        if table.storage == "host" or limit is None:
            continue
        full = taken + loads[table.name].memory
        if np.max(full) <= limit:
            taken, storages[table.name] = full, "device"
        elif asked:
            raise ValueError(
                "The tables that are to lie on GPUs do not fit there: with "
                f"{table.name!r} the fullest of {len(taken)} ranks needs "
                f"{np.max(full):,.0f} bytes for weights and slots. Received: "
                f"storage='device', device_memory={limit:,.0f}. Leave "
                "`storage` out of some of them, or use more ranks or "
                "dtype='bfloat16'."
            )
    return storages


def _order(
    table: TableNumbers, loads: Mapping[str, Load]
) -> tuple[bool, float]:
    load = loads[table.name]
    return table.storage != "device", -float(
        np.sum(load.lookups) / max(float(np.sum(load.memory)), 1.0)
    )
