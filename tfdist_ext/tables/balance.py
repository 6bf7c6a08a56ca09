# SPDX-License-Identifier: Apache-2.0
"""Chooses shapes and ranks for the tables of a plan."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tfdist_ext.tables import cost
from tfdist_ext.tables import load as load_lib
from tfdist_ext.tables.cost import Floats
from tfdist_ext.tables.load import Load
from tfdist_ext.tables.load import RankLoads
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.problem import Problem
from tfdist_ext.tables.problem import TableNumbers

Bools = npt.NDArray[np.bool_]
Triple = tuple[int, int, bool]


def shapes_of(
    problem: Problem, placements: Sequence[TablePlacement] = ()
) -> list[Triple]:
    """Row parts, column parts and deduplicate of all shapes to try.

    (0, 0, False) is data_parallel. Parts are divisors of the number of ranks.
    For row-wise or column-wise tables that are smaller than that, there is also
    one part per row or column. The shapes that users gave are added.

    Args:
        problem: the tables and the number of ranks.
        placements: placements whose shapes are added.
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


def allowed_shapes(problem: Problem, triples: list[Triple]) -> Bools:
    """Which of `shapes_of` each table may have, `[tables, K]`.

    Each table has at least one: a given shape is among them, and 1 x 1 fits.
    """
    array = np.array(triples)
    return np.stack([_is_allowed(problem, t, array) for t in problem.tables])


def check_placement(
    table: TableNumbers, placement: TablePlacement, world_size: int
) -> None:
    """Rejects a placement that the table or the ranks cannot have.

    Raises:
        ValueError: the placement is invalid.
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


def _is_allowed(
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
    """Shapes of a kind; row- and column-wise with as many ranks as fit."""
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


# Weights of the time of the widest cell relative to the mean time. The first is
# 0. The second, infinity, allows only even shapes. Then the weights grow. The
# search ends when more than `_PATIENCE` plans in a row are not better.
_CELL_WEIGHTS = (0.0, math.inf, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_PATIENCE = 2
# Exceeds the seconds of any step and the bytes of any table.
_LONG_TIME = 1e18
_EVEN = 1.05
# Cost of `Options.even_memory` bytes, as a share of a step. With it, the plan
# whose fullest rank has the least memory is chosen among equal plans.
_FULL = 0.02
# Prices of memory, relative to the mean step over the mean memory.
_PRICES = tuple(10.0 ** (0.5 * n) for n in range(-8, 9))


class Options:
    """Costs of a table in every shape that it may have, `[tables, K]` each.

    Weighted seconds are the seconds of transfers, plus `effort` times the
    seconds of computing.

    Attributes:
        triples: the shapes.
        costs: costs of each shape.
        allowed: whether the table may have the shape.
        effort: weight of a second of computing relative to one of transfers.
        least_time: weighted seconds if all tables had their cheapest shape and
            all ranks had the same load.
        even_memory: least possible bytes of the fullest rank.
        mean_time: weighted seconds, mean over the ranks.
        score: `mean_time` plus the price of the memory of the fullest rank.
        mean_bytes: bytes sent, mean over the ranks.
        mean_memory: bytes of memory, mean over the ranks.
        cell_time: weighted seconds that the widest cell adds to its rank.
        cell_memory: bytes that the widest cell adds to its rank.
        even: whether all ranks have a cell, or none; `[1, K]`.
    """

    def __init__(
        self, problem: Problem, placements: Sequence[TablePlacement] = ()
    ) -> None:
        setting = problem.setting
        self.problem = problem
        self.triples = shapes_of(problem, placements)
        self.allowed = allowed_shapes(problem, self.triples)
        shapes = cost.make_shapes(self.triples)
        self.costs = cost.compute(problem, shapes)
        self.dims = np.array([[t.dim] for t in problem.tables], np.float64)
        share = shapes.cells / setting.world_size
        columns = self.dims * shapes.row_parts / setting.world_size
        held = load_lib.load_of_cells(self.costs, share, columns, setting)
        mean = load_lib.load_without_cells(self.costs) + held
        widest = np.ceil(self.dims / np.maximum(shapes.column_parts, 1))
        cell = load_lib.load_of_cells(self.costs, 1.0, widest, setting)
        self.mean_bytes = mean.sent
        self.mean_memory = mean.memory
        self.cell_memory = cell.memory
        self._mean, self._cell = mean, cell
        self._everyone = self.costs.memory
        self.even_memory = max(self._least(self.mean_memory), 1.0)
        self._on_first_ranks: dict[int, TablePlacement] = {}
        self._weigh(1.0)
        cells = shapes.cells[None, :]
        self.even = (cells == 0) | (cells == setting.world_size)

    def weighing(self, effort: float) -> Options:
        """The same options with another `effort`."""
        options = copy.copy(self)
        options._weigh(effort)
        return options

    def time(self, load: Load) -> Floats:
        """Weighted seconds of a load."""
        setting = self.problem.setting
        return load.transfer(setting) + self.effort * load.computing(setting)

    def worst(self, load: Load) -> float:
        """Weighted seconds of the busiest rank, plus the memory's price."""
        fullest = float(np.max(load.memory))
        return float(np.max(self.time(load))) + self._byte_price * fullest

    def _weigh(self, effort: float) -> None:
        self.effort = effort
        self.mean_time = self.time(self._mean)
        self.least_time = self._least(self.mean_time)
        self._byte_price = _FULL * self.least_time / self.even_memory
        full = self.cell_memory + self._everyone
        self.cell_time = self.time(self._cell)
        self.score = self.mean_time + self._byte_price * full

    def _least(self, values: Floats) -> float:
        return float(np.where(self.allowed, values, np.inf).min(1).sum())

    def first_ranks(self, shape: int) -> TablePlacement:
        """A placement of a shape of `triples` on ranks 0, 1, 2, ..."""
        if shape not in self._on_first_ranks:
            row_parts, column_parts, deduplicate = self.triples[shape]
            ranks = tuple(range(row_parts * column_parts))
            self._on_first_ranks[shape] = (
                TablePlacement(row_parts, column_parts, ranks, deduplicate)
                if ranks
                else TablePlacement()
            )
        return self._on_first_ranks[shape]

    def shape_index(self, placement: TablePlacement) -> int:
        """Index in `triples` of the shape of a placement."""
        return self.triples.index(cost.shape_of(placement))


@dataclasses.dataclass(frozen=True)
class Solution:
    """Placements of all tables, and the load of the ranks, `[W]`.

    `time` is `Options.worst` of the options that it was chosen with.
    """

    placements: tuple[TablePlacement, ...]
    load: Load
    time: float

    @property
    def sent(self) -> float:
        """Bytes sent by the rank that sends most."""
        return float(np.max(self.load.sent))

    @property
    def memory(self) -> float:
        """Bytes on the fullest rank."""
        return float(np.max(self.load.memory))


def total(
    load: Load, placements: Sequence[TablePlacement], problem: Problem
) -> Load:
    """Load of a plan: its tables, and the fixed cost of its exchanges."""
    if any(placement.ranks for placement in placements):
        return load + load_lib.load_of_exchanges(problem.setting)
    return load


def solve(options: Options) -> Solution:
    """The best plan found.

    Raises:
        ValueError: the memory limit is below the least memory found.
    """
    limit = options.problem.setting.memory_limit
    for price in _prices(options) if limit else [0.0]:
        # The least memory must not depend on the weight of computing.
        weighed = options if price < math.inf else options.weighing(1.0)
        tried = _tried(weighed, price)
        fitting = [s for s in tried if limit is None or s.memory <= limit]
        if fitting:
            return min(fitting, key=lambda solution: solution.time)
    least = min(solution.memory for solution in tried)
    raise ValueError(
        f"No plan fits into memory_limit={limit:,.0f} bytes per rank. The "
        f"least that weights and slots need is {math.ceil(least):,} bytes "
        f"on the fullest of {options.problem.setting.world_size} ranks. Use "
        "more ranks, dtype='bfloat16', or an optimizer with fewer slots."
    )


def _tried(options: Options, price: float) -> list[Solution]:
    """One plan for each choice of shapes."""
    tried: list[Solution] = []
    limit = options.problem.setting.memory_limit
    worse = 0
    for choice in _choices(options, price):
        solution = _assigned(options, choice, price)
        best = min((other.time for other in tried), default=math.inf)
        worse = worse + 1 if solution.time >= best else 0
        tried.append(solution)
        if limit is None and (_is_even(solution, options) or worse > _PATIENCE):
            break
    return tried


def _is_even(solution: Solution, options: Options) -> bool:
    """Whether no other plan can be much better: all tables are cheapest."""
    exchanges = load_lib.load_of_exchanges(options.problem.setting)
    fixed = float(options.time(exchanges))
    return bool(solution.time - fixed <= _EVEN * options.least_time)


def _prices(options: Options) -> list[float]:
    rate = options.least_time / options.even_memory
    return [0.0, *(price * rate for price in _PRICES), math.inf]


def _choices(options: Options, price: float) -> Iterator[np.ndarray]:
    """Yields shapes of all tables, by different weights of a cell's time."""
    everywhere = options.allowed[:, 0]
    if everywhere.all():
        yield np.zeros(len(everywhere), np.int64)
    if price < math.inf:
        mean = options.score + price * options.mean_memory
        cell = options.cell_time
    else:
        # Time decides only between shapes with the same memory.
        mean = options.mean_memory + 1e-3 * options.mean_time
        cell = options.cell_memory
    seen: set[bytes] = set()
    for weight in _CELL_WEIGHTS:
        if weight < math.inf:
            score = mean + weight * cell
        else:
            score = np.where(options.even, mean, mean + _LONG_TIME)
        choice = np.where(options.allowed, score, np.inf).argmin(1)
        if choice.tobytes() not in seen:
            seen.add(choice.tobytes())
            yield choice


def _assigned(options: Options, choice: np.ndarray, price: float) -> Solution:
    """Assigns ranks to the cells of all tables in the chosen shapes."""
    problem = options.problem
    world_size = problem.setting.world_size
    ranks = _rank_loads(options, choice, by_memory=price == math.inf)
    placements: list[TablePlacement | None] = [None] * len(choice)
    loose = []
    for t, shape in enumerate(choice.tolist()):
        row_parts, column_parts, _ = options.triples[shape]
        table = problem.tables[t]
        if isinstance(table.placement, TablePlacement):
            placements[t] = table.placement
            ranks.hold(t, table.placement.ranks, column_parts)
        elif row_parts == 0:
            placements[t] = options.first_ranks(shape)
        elif row_parts * column_parts == world_size and (
            table.dim % column_parts == 0
        ):
            placements[t] = options.first_ranks(shape)
            ranks.hold_evenly(t, column_parts)
        else:
            loose.append(t)
    order = options.cell_memory if price == math.inf else options.cell_time
    longest = sorted(loose, key=lambda t: -order[t, choice[t]])
    for t in longest:
        row_parts, column_parts, deduplicate = options.triples[choice[t]]
        taken = ranks.take(t, row_parts, column_parts)
        placements[t] = TablePlacement(
            row_parts, column_parts, taken, deduplicate
        )
    done = tuple(p for p in placements if p is not None)
    load = total(ranks.load(), done, problem)
    return Solution(done, load, options.worst(load))


def _rank_loads(
    options: Options, choice: np.ndarray, by_memory: bool
) -> RankLoads:
    rows = np.arange(len(choice))
    costs = cost.Costs(
        *(
            getattr(options.costs, field.name)[rows, choice]
            for field in dataclasses.fields(cost.Costs)
        )
    )
    dims = [table.dim for table in options.problem.tables]
    return RankLoads(
        costs, dims, options.problem.setting, options.effort, by_memory
    )


# Limits of the search; a plan of many tables is already balanced.
_ROUNDS = 20
_TABLES = 4
_SHAPES = 6
# Weights of computing relative to transfers.
_EFFORTS = (1.0, 0.3, 0.1, 0.01)
# A smaller gain is not worth a less regular plan.
_WORTHWHILE = 0.99


def improve(solution: Solution, options: Options) -> Solution:
    """Moves tables as long as that shortens the step by 1% or more.

    Args:
        solution: initial solution; it is not changed.
        options: options of its tables.

    Returns:
        A solution that is not slower.
    """
    for _ in range(_ROUNDS):
        nearby = list(_moved(solution, options))
        found = min(nearby, key=lambda other: other.time, default=solution)
        if found.time > _WORTHWHILE * solution.time:
            break
        solution = found
    return solution


def best_solution(options: Options) -> Solution:
    """The fastest of the plans that send little more than the least.

    Args:
        options: options of the tables.

    Raises:
        ValueError: no plan fits into the memory limit.
    """
    found = [_found(options, effort) for effort in (_EFFORTS[0], _EFFORTS[-1])]
    if len(_lean(found, options)) == 1:
        found += [_found(options, effort) for effort in _EFFORTS[1:-1]]
    return min(_lean(found, options), key=lambda plan: options.worst(plan.load))


def _lean(found: list[Solution], options: Options) -> list[Solution]:
    """The plans that send little more than the one that sends least."""
    least = min(plan.sent for plan in found)
    more = options.problem.setting.bytes_slack * max(least, 1.0)
    return [plan for plan in found if plan.sent <= least + more]


def _found(options: Options, effort: float) -> Solution:
    weighed = options.weighing(effort)
    return improve(solve(weighed), weighed)


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
    """Yields solutions that move one table of the busiest rank elsewhere."""
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
    """Yields the table's cheapest shapes on the least loaded ranks."""
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
