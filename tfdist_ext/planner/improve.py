# SPDX-License-Identifier: Apache-2.0
"""Improves a plan by moving tables off its busiest rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from tfdist_ext.planner import balance
from tfdist_ext.planner import load as load_lib
from tfdist_ext.planner.balance import Options
from tfdist_ext.planner.balance import Solution
from tfdist_ext.planner.load import Load
from tfdist_ext.tables.placement import TablePlacement

# How far to search; a plan of many tables is balanced to begin with.
_ROUNDS = 20
_TABLES = 4
_SHAPES = 6
# What computing weighs against transfers.
_EFFORTS = (1.0, 0.3, 0.1, 0.01)
# Less than this is not worth a plan that looks less regular.
_WORTHWHILE = 0.99


def improve(solution: Solution, options: Options) -> Solution:
    """Moves tables while that shortens the step by a percent or more.

    Args:
        solution: to start with; left as it is.
        options: of its tables.

    Returns:
        A solution that is no slower.
    """
    for _ in range(_ROUNDS):
        nearby = list(_moved(solution, options))
        found = min(nearby, key=lambda other: other.time, default=solution)
        if found.time > _WORTHWHILE * solution.time:
            break
        solution = found
    return solution


def best(options: Options) -> Solution:
    """The fastest plan of those that send little more than the least.

    Args:
        options: of the tables.

    Raises:
        ValueError: if no plan keeps the memory limit.
    """
    found = [_found(options, effort) for effort in (_EFFORTS[0], _EFFORTS[-1])]
    if len(_lean(found, options)) == 1:
        found += [_found(options, effort) for effort in _EFFORTS[1:-1]]
    return min(_lean(found, options), key=lambda plan: options.worst(plan.load))


def _lean(found: list[Solution], options: Options) -> list[Solution]:
    """Those that send little more than the one that sends least."""
    least = min(plan.sent for plan in found)
    more = options.problem.setting.bytes_slack * max(least, 1.0)
    return [plan for plan in found if plan.sent <= least + more]


def _found(options: Options, effort: float) -> Solution:
    weighed = options.weighing(effort)
    return improve(balance.solve(weighed), weighed)


def load_of_table(
    options: Options, table: int, placement: TablePlacement
) -> Load:
    """Load of all ranks, `[W]`, from one table."""
    problem = options.problem
    costs = options.costs.pick(table, options.shape_index(placement))
    return load_lib.load_of_placement(
        costs, problem.tables[table].dim, placement, problem.setting
    )


def _moved(solution: Solution, options: Options) -> Iterator[Solution]:
    """Solutions in which one table on the busiest rank is elsewhere."""
    setting = options.problem.setting
    busiest = int(np.argmax(options.time(solution.load)))
    for t in _movable(solution, options, busiest):
        others = solution.load + _negative(
            load_of_table(options, t, solution.placements[t])
        )
        for placement in _alternatives(options, t, others):
            if placement == solution.placements[t]:
                continue
            load = others + load_of_table(options, t, placement)
            memory = float(np.max(load.memory))
            limit = setting.memory_limit
            if limit is not None and memory > max(limit, solution.memory):
                continue
            placements = list(solution.placements)
            placements[t] = placement
            time = options.worst(load)
            yield Solution(tuple(placements), load, time)


def _movable(solution: Solution, options: Options, rank: int) -> list[int]:
    """The tables that load the rank most, those not on all ranks first."""
    cells = []
    for t, placement in enumerate(solution.placements):
        asked = options.problem.tables[t].placement
        if rank in placement.ranks and not isinstance(asked, TablePlacement):
            shape = options.shape_index(placement)
            even = bool(options.even[0, shape])
            cells.append((even, -options.cell_time[t, shape], t))
    return [t for *_, t in sorted(cells)[:_TABLES]]


def _alternatives(
    options: Options, table: int, others: Load
) -> Iterator[TablePlacement]:
    """The table's cheapest shapes on the ranks that have least to do."""
    times = np.where(options.allowed[table], options.score[table], np.inf)
    lightest = np.argsort(options.time(others), kind="stable").tolist()
    for shape in np.argsort(times, kind="stable")[:_SHAPES].tolist():
        row_parts, column_parts, deduplicate = options.triples[shape]
        if times[shape] == np.inf:
            return
        if row_parts == 0:
            yield TablePlacement()
            continue
        ranks = tuple(sorted(lightest[: row_parts * column_parts]))
        yield TablePlacement(row_parts, column_parts, ranks, deduplicate)


def _negative(load: Load) -> Load:
    fields = dataclasses.fields(load)
    return Load(*(-getattr(load, field.name) for field in fields))
