# SPDX-License-Identifier: Apache-2.0
"""Where every table of a model lives: `plan(...)` makes a `ShardingPlan`.

No TensorFlow here. `problem.py` reduces configurations to numbers, `cost.py`
has the model of bytes, time and memory, `balance.py` chooses.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import types
import uuid
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist_ext.tables import balance
from tfdist_ext.tables import checks
from tfdist_ext.tables import plan_text
from tfdist_ext.tables import problem as problem_lib
from tfdist_ext.tables.checks import Storage
from tfdist_ext.tables.load import Load
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.plan_text import Figures
from tfdist_ext.tables.problem import DEFAULT_EXPONENT
from tfdist_ext.tables.problem import Problem
from tfdist_ext.tables.problem import make_problem
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig
from tfdist_ext.tables.table_config import placement_from_dict
from tfdist_ext.tables.table_config import placement_to_dict

__all__ = ["ShardingPlan", "plan"]

_FORMAT = "tfdist_ext.ShardingPlan"
_VERSION = 1
_NO_PLAN = f"no sharding plan of version {_VERSION}, or an invalid one"


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """The placement of every table, and what it costs.

    Made by `plan`, or read by `load`. Two plans are equal if they place the
    same tables alike for the same problem.

    Attributes:
        problem: the numbers it was made for.
        placements: of every table, by name, in the order of the problem.

    Raises:
        ValueError: if a table has no placement, or one it cannot have.
    """

    problem: Problem
    placements: Mapping[str, TablePlacement]

    def __post_init__(self) -> None:
        names = [table.name for table in self.problem.tables]
        if sorted(names) != sorted(self.placements):
            raise ValueError(
                "A plan needs one placement for each of its tables. Received: "
                f"placements of {sorted(self.placements)}, tables "
                f"{sorted(names)}."
            )
        for table in self.problem.tables:
            balance.check_placement(
                table, self.placements[table.name], self.world_size
            )
        ordered = {name: self.placements[name] for name in names}
        object.__setattr__(self, "placements", types.MappingProxyType(ordered))
        _ = self.figures.storages  # refuses what cannot be

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.problem.setting.world_size

    def placement_of(self, table: str) -> TablePlacement:
        """Placement of the table of that name.

        Raises:
            ValueError: if there is none.
        """
        self.problem.index(table)
        return self.placements[table]

    def storage_of(self, table: str) -> Storage:
        """Where the table of that name is: "device" or "host".

        Raises:
            ValueError: if there is none.
        """
        self.problem.index(table)
        return self.figures.storages[table]

    def check_fits(self, table: TableConfig) -> None:
        """Refuses a table that is not the one of the plan.

        Raises:
            ValueError: for other sizes, or what contradicts the placement.
        """
        planned = self.problem.tables[self.problem.index(table.name)]
        sizes = table.vocabulary_size, table.embedding_dim
        if (planned.rows, planned.dim) != sizes:
            raise ValueError(
                f"The plan is for a table {table.name!r} of {planned.rows} "
                f"rows and {planned.dim} columns. Received: {sizes[0]} rows "
                f"and {sizes[1]} columns. Plan anew."
            )
        storage = self.storage_of(table.name)
        if table.storage not in (None, storage):
            raise ValueError(
                f"The plan has table {table.name!r} on storage={storage!r}. "
                f"Received: storage={table.storage!r}. Plan anew."
            )
        placement = self.placements[table.name]
        if placement.ranks:
            dataclasses.replace(table, placement=placement)

    @functools.cached_property
    def figures(self) -> Figures:
        """What the plan costs, table by table."""
        return Figures(self.problem, self.placements)

    @property
    def loads(self) -> Mapping[str, Load]:
        """What each table loads the ranks with, by name, arrays `[W]`."""
        return self.figures.loads

    @property
    def total(self) -> Load:
        """What all tables and the exchanges load the ranks with, `[W]`."""
        return self.figures.total

    @property
    def device_memory(self) -> float:
        """Bytes of weights and slots on the fullest of the ranks' GPUs."""
        return float(np.max(self.figures.on_devices.memory))

    @property
    def bytes_per_step(self) -> float:
        """Bytes that the rank that sends most sends in a step."""
        return float(np.max(self.total.sent))

    @property
    def seconds_per_step(self) -> float:
        """Estimated time of the busiest rank's tables in a step."""
        return self.figures.seconds_per_step

    @property
    def memory(self) -> float:
        """Bytes of weights and slots on the fullest rank."""
        return float(np.max(self.total.memory))

    def summary(self) -> str:
        """The plan as a table of text, a line per table."""
        return plan_text.summary(self.figures)

    def explain(self, table: str) -> str:
        """All placements the table could have, and why it has this one."""
        return plan_text.explain(self.figures, table)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws memory, bytes sent and lookups of every rank.

        Args:
            path: file to write, if any.

        Returns:
            The matplotlib Figure.

        Raises:
            ImportError: without matplotlib.
        """
        return plan_text.draw_plan(self.figures, path)

    def replace(
        self, table: str, placement: TablePlacement | str
    ) -> ShardingPlan:
        """The plan with one table placed otherwise.

        Args:
            table: its name.
            placement: where it goes; for a kind such as "row_wise" the
                planner chooses the ranks. Other tables stay where they are.

        Raises:
            ValueError: for a placement the table cannot have, or without
                memory for it.
        """
        index = self.problem.index(table)
        # The others are held in place while this one is planned.
        kept = [
            dataclasses.replace(t, placement=self.placements[t.name])
            for t in self.problem.tables
        ]
        kept[index] = dataclasses.replace(kept[index], placement=placement)
        solved = _solve(dataclasses.replace(self.problem, tables=tuple(kept)))
        tables = list(self.problem.tables)
        tables[index] = kept[index]
        return dataclasses.replace(
            solved,
            problem=dataclasses.replace(self.problem, tables=tuple(tables)),
        )

    def at(self, world_size: int) -> ShardingPlan:
        """A plan for the same problem on another number of ranks.

        What was asked for is kept: kinds, `replace`, `forced`. Of a
        `TablePlacement` on ranks that are not there its kind is.
        """
        setting = dataclasses.replace(
            self.problem.setting, world_size=world_size
        )
        tables = tuple(_within(t, world_size) for t in self.problem.tables)
        return _solve(Problem(tables, self.problem.features, setting))

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON can hold it."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "placements": {
                name: placement_to_dict(placement)
                for name, placement in self.placements.items()
            },
            "problem": self.problem.to_dict(),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ShardingPlan:
        """The plan that `to_dict` describes.

        Raises:
            ValueError: for what describes none.
        """
        try:
            whole = checks.mapping(content, "plan")
            found = (whole.get("format"), whole.get("version"))
            if found != (_FORMAT, _VERSION):
                raise ValueError(
                    f"format and version are {checks.brief(found)}"
                )
            problem = Problem.from_dict(whole.get("problem"))
            placements = checks.mapping(
                whole.get("placements"), "placements"
            ).items()
            return cls(
                problem,
                {
                    name: placement_from_dict(p, f"placements[{name!r}]")
                    for name, p in placements
                },
            )
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_NO_PLAN}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, whole: all ranks may save to one path."""
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        beside = pathlib.Path(f"{os.fspath(path)}.{uuid.uuid4().hex}")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardingPlan:
        """Reads what `save` wrote, perhaps edited.

        Raises:
            ValueError: if the file is something else.
        """
        where = os.fspath(path)
        data = pathlib.Path(path).read_bytes()
        try:
            content = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} holds {_NO_PLAN}: {error}") from error
        try:
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"{where} holds {error}") from error


def plan(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    world_size: int,
    *,
    batch_size: int | None = None,
    wire_bytes: float = 4,
    link_bytes_per_second: float = 150e6,
    read_bytes_per_second: float = 8e9,
    memory_limit: float | None = None,
    device_memory: float | None = None,
    bytes_slack: float = 0.1,
    slots_per_weight: float | str = 1.0,
    popularity: float | Mapping[str, float] = DEFAULT_EXPONENT,
    forced: Mapping[str, TablePlacement | str] | None = None,
) -> ShardingPlan:
    """Chooses a placement for every table; the same one on every rank.

    Args:
        tables: to place.
        features: that look up in them.
        world_size: number of ranks.
        batch_size: samples per rank and step; None if not known yet, then
            256 are assumed and the plan says so.
        wire_bytes: of a number of a result: 4, or 2 with a 16-bit wire dtype.
        link_bytes_per_second: of a rank, each way.
        read_bytes_per_second: of a rank, reading rows of a table at random.
        memory_limit: bytes of weights and slots per rank.
        device_memory: how many of these may be on a rank's GPU, see
            `decide_storage`; None leaves all tables on the hosts.
        bytes_slack: share of bytes to send beyond the least, if that saves
            time; math.inf plans for time alone.
        slots_per_weight: numbers the optimizer keeps per weight, or its name.
            A table's own optimizer goes before.
        popularity: Zipf exponent, of all or by table; 0 is uniform.
        forced: placements or kinds by table, before the tables' own.

    Raises:
        ValueError: for arguments that contradict each other, limits of memory
            that no plan keeps; the message has the least.

    Returns:
        The plan of least cost that was found.
    """
    setting = problem_lib.Setting(
        world_size=world_size,
        **problem_lib.batch(batch_size),
        wire_bytes=wire_bytes,
        link_bytes_per_second=link_bytes_per_second,
        read_bytes_per_second=read_bytes_per_second,
        memory_limit=memory_limit,
        device_memory=device_memory,
        bytes_slack=bytes_slack,
    )
    problem = make_problem(
        tables, features, setting, slots_per_weight, popularity, forced or {}
    )
    return _solve(problem)


def _within(
    table: problem_lib.TableNumbers, world_size: int
) -> problem_lib.TableNumbers:
    """A table whose ranks, if any are asked for, are among `world_size`."""
    asked = table.placement
    if not isinstance(asked, TablePlacement):
        return table
    if max(asked.ranks, default=0) < world_size:
        return table
    return dataclasses.replace(
        table, placement=asked.kind, deduplicate=asked.deduplicate
    )


def _solve(problem: Problem) -> ShardingPlan:
    if not problem.tables:
        return ShardingPlan(problem, {})
    options = balance.Options(problem)
    solution = balance.best_solution(options)
    names = [table.name for table in problem.tables]
    return ShardingPlan(
        problem, dict(zip(names, solution.placements, strict=True))
    )
