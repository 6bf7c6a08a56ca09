# SPDX-License-Identifier: Apache-2.0
"""The ways to place a table that a plan chooses from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tfdist_ext.planner import cost
from tfdist_ext.planner.problem import Problem
from tfdist_ext.planner.problem import TableNumbers
from tfdist_ext.tables.placement import TablePlacement

Bools = npt.NDArray[np.bool_]
Triple = tuple[int, int, bool]


def shapes_of(
    problem: Problem, placements: Sequence[TablePlacement] = ()
) -> list[Triple]:
    """Row parts, column parts and deduplicate of all that is tried.

    (0, 0, False) is data_parallel. Parts are divisors of the number of ranks;
    for tables that are smaller than that and must be cut into rows or columns
    there is a part per row or column as well, and what users gave.

    Args:
        problem: the tables and the number of ranks.
        placements: whose shapes are to be among them.
    """
    world_size = problem.setting.world_size
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    parts = {(r, c) for r in divisors for c in divisors if r * c <= world_size}
    for table in problem.tables:
        if table.placement == "row_wise":
            parts.add((min(table.rows, world_size), 1))
        elif table.placement == "column_wise":
            parts.add((1, min(table.dim, world_size)))
    given = [
        table.placement
        for table in problem.tables
        if isinstance(table.placement, TablePlacement)
    ]
    for placement in [*given, *placements]:
        row_parts, column_parts, _ = cost.shape_of(placement)
        parts.add((row_parts, column_parts))
    parts.discard((0, 0))
    triples = [(*part, d) for part in sorted(parts) for d in (False, True)]
    return [(0, 0, False), *triples]


def allowed(problem: Problem, triples: list[Triple]) -> Bools:
    """Which of `shapes_of` each table may have, `[tables, K]`.

    Each has one at least: what was given is among them, and 1 x 1 fits.
    """
    array = np.array(triples)
    return np.stack([_allowed(problem, t, array) for t in problem.tables])


def check_placement(
    table: TableNumbers, placement: TablePlacement, world_size: int
) -> None:
    """Refuses a placement that the table or the ranks cannot have.

    Raises:
        ValueError: then.
    """
    if any(not 0 <= rank < world_size for rank in placement.ranks):
        raise ValueError(
            f"Table {table.name!r} is placed on ranks {placement.ranks}, but "
            f"there are ranks 0 to {world_size - 1} only."
        )
    if placement.ranks and placement.column_parts > table.dim:
        raise ValueError(
            f"Table {table.name!r} has {table.dim} columns. Received: a "
            f"placement of {placement.column_parts} column parts. Use fewer."
        )


def _allowed(
    problem: Problem, table: TableNumbers, triples: npt.NDArray[np.int64]
) -> Bools:
    world_size = problem.setting.world_size
    asked = table.placement
    if isinstance(asked, TablePlacement):
        check_placement(table, asked, world_size)
        return np.asarray((triples == cost.shape_of(asked)).all(1))
    rows, columns, deduplicate = triples[:, 0], triples[:, 1], triples[:, 2]
    replicated = rows == 0
    fits = (rows <= table.rows) & (columns <= table.dim)
    if asked in ("data_parallel", "default_device"):
        return replicated
    fits &= ~replicated | (asked == "auto" and world_size > 1)
    if table.deduplicate is not None:
        fits &= replicated | (deduplicate == table.deduplicate)
    elif world_size == 1:
        fits &= deduplicate == 0
    if asked in ("auto", "sparsecore"):
        return fits
    return fits & _of_kind(asked, fits, rows, columns)


def _of_kind(
    asked: str,
    fits: Bools,
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
) -> Bools:
    """Row-wise and column-wise are over as many ranks as the table allows."""
    if asked == "table_wise":
        return rows * columns == 1
    by_row = fits & (columns == 1)
    by_row &= rows == rows.max(initial=0, where=by_row)
    by_column = fits & (rows == 1)
    by_column &= columns == columns.max(initial=0, where=by_column)
    if asked == "row_wise":
        return by_row
    if asked == "column_wise":
        return by_column
    grid = fits & (rows > 1) & (columns > 1)
    # A prime number of ranks, or a tiny table, has no grid.
    return grid if grid.any() else by_row | by_column
