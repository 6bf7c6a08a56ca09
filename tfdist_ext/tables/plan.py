# SPDX-License-Identifier: Apache-2.0
"""Placements of all tables of a model: `plan(...)` makes a `ShardingPlan`.

This module does not use TensorFlow. `problem.py` converts configurations to
numbers, `cost.py` models bytes, time and memory, and `balance.py` chooses
placements.
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
    """The placement of every table, with its costs.

    Made by `plan`, or read by `load`. Two plans are equal if they have the same
    placements for the same problem.

    Attributes:
        problem: numbers that the plan was made for.
        placements: placement of every table, by name, in the problem's order.
        note: what the running model does otherwise than planned, the last
            line of `summary`; "" for nothing. It is not saved.

    Raises:
        ValueError: a table has no placement, or an invalid one.
    """

    problem: Problem
    placements: Mapping[str, TablePlacement]
    note: str = dataclasses.field(default="", compare=False)

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
        _ = self.figures.storages  # raises if impossible

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.problem.setting.world_size

    def placement_of(self, table: str) -> TablePlacement:
        """Placement of the table with a name.

        Raises:
            ValueError: there is no such table.
        """
        self.problem.index(table)
        return self.placements[table]

    def storage_of(self, table: str) -> Storage:
        """Storage of the table with a name: "device" or "host".

        Raises:
            ValueError: there is no such table.
        """
        self.problem.index(table)
        return self.figures.storages[table]

    def check_fits(self, table: TableConfig) -> None:
        """Rejects a table that is not the table of the plan.

        Raises:
            ValueError: the table has other sizes, or contradicts the placement.
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
        """Costs of the plan, by table."""
        return Figures(self.problem, self.placements)

    @property
    def loads(self) -> Mapping[str, Load]:
        """Load of the ranks by each table, by name, arrays `[W]`."""
        return self.figures.loads

    @property
    def total(self) -> Load:
        """Load of the ranks by all tables and the exchanges, `[W]`."""
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
        """Estimated seconds per step for the tables of the busiest rank."""
        return self.figures.seconds_per_step

    @property
    def memory(self) -> float:
        """Bytes of weights and slots on the fullest rank."""
        return float(np.max(self.total.memory))

    def summary(self) -> str:
        """The plan as a text table, one line per table."""
        lines = [plan_text.summary(self.figures), self.note]
        return "\n".join(filter(None, lines))

    def explain(self, table: str) -> str:
        """All placements that the table could have, and why it has this one."""
        return plan_text.explain(self.figures, table)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plots memory, bytes sent and lookups of every rank.

        Args:
            path: file to write, None for none.

        Returns:
            The matplotlib Figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return plan_text.draw_plan(self.figures, path)

    def replace(
        self, table: str, placement: TablePlacement | str
    ) -> ShardingPlan:
        """A plan with another placement of one table.

        Args:
            table: name of the table.
            placement: new placement; for a kind such as "row_wise" the planner
                chooses the ranks. Other tables keep their placements.

        Raises:
            ValueError: the table cannot have the placement, or memory is too
                small for it.
        """
        index = self.problem.index(table)
        # The placements of other tables are fixed while this one is planned.
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

        Requested kinds, also by `replace` and `forced`, stay in effect. If the
        ranks of a requested `TablePlacement` do not all exist, only its kind
        stays in effect.
        """
        setting = self.problem.setting
        if world_size != setting.world_size:  # other ranks, of other speeds
            setting = dataclasses.replace(
                setting, world_size=world_size, rank_speeds=None
            )
        tables = tuple(_within(t, world_size) for t in self.problem.tables)
        return _solve(Problem(tables, self.problem.features, setting))

    def to_dict(self) -> checks.Fields:
        """The plan as JSON values."""
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
    def from_dict(cls, content: Mapping[str, object]) -> ShardingPlan:
        """The plan that `to_dict` describes.

        Raises:
            ValueError: the content describes no plan.
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
        """Writes JSON to a new file, then renames it, so all ranks may save."""
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        temporary = pathlib.Path(f"{os.fspath(path)}.{uuid.uuid4().hex}")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardingPlan:
        """Reads a file that `save` wrote, and that may have been edited.

        Raises:
            ValueError: the file has no valid plan.
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
    rank_speeds: Sequence[float] | None = None,
) -> ShardingPlan:
    """Chooses a placement for every table, the same on every rank.

    Args:
        tables: tables to place.
        features: features that are looked up in them.
        world_size: number of ranks.
        batch_size: samples per rank and step; None assumes 256 and says so.
        wire_bytes: bytes of a number of a result; 2 for 16 bits, 1.0625 int8.
        link_bytes_per_second: bytes per second of a rank, each way.
        read_bytes_per_second: bytes of random rows that a rank reads.
        memory_limit: bytes of weights and slots per rank.
        device_memory: how many of these bytes may be on a rank's GPU, see
            `decide_storage`; None leaves all tables on the hosts.
        bytes_slack: share of bytes that may be sent beyond the least, to save
            time; math.inf only minimizes time.
        slots_per_weight: numbers that the optimizer stores per weight, or its
            name. A table's own optimizer takes precedence.
        popularity: Zipf exponent, for all tables or by table; 0 is uniform.
        forced: placements or kinds by table; they override the tables' own.
        rank_speeds: relative speed of each rank, None if all are equal.

    Returns:
        The plan of least cost that was found.

    Raises:
        ValueError: arguments contradict each other, or no plan fits into the
            memory limits; the message has the least memory.
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
        rank_speeds=rank_speeds,
    )
    problem = make_problem(
        tables, features, setting, slots_per_weight, popularity, forced or {}
    )
    return _solve(problem)


def _within(
    table: problem_lib.TableNumbers, world_size: int
) -> problem_lib.TableNumbers:
    """A table whose requested ranks, if any, are below `world_size`."""
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
