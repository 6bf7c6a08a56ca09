# SPDX-License-Identifier: Apache-2.0
"""What a plan costs, for its text and its plot."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from tfdist_ext.planner import balance
from tfdist_ext.planner import improve
from tfdist_ext.planner import storage
from tfdist_ext.planner.load import Load
from tfdist_ext.planner.problem import Problem
from tfdist_ext.tables.choices import Storage
from tfdist_ext.tables.placement import TablePlacement


@dataclasses.dataclass(frozen=True)
class Figures:
    """Loads of the tables of a problem that are placed somewhere.

    Attributes:
        problem: the numbers of the tables, and of the machine.
        placements: of every table, by name, in the order of the problem.
    """

    problem: Problem
    placements: Mapping[str, TablePlacement]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.problem.setting.world_size

    @functools.cached_property
    def options(self) -> balance.Options:
        """Costs of every table in every shape."""
        return balance.Options(self.problem, list(self.placements.values()))

    @functools.cached_property
    def loads(self) -> Mapping[str, Load]:
        """What each table loads the ranks with, by name, arrays `[W]`."""
        return {
            name: improve.load_of_table(self.options, index, placement)
            for index, (name, placement) in enumerate(self.placements.items())
        }

    @functools.cached_property
    def storages(self) -> Mapping[str, Storage]:
        """Where each table lies, by name.

        Raises:
            ValueError: if what was asked for cannot be.
        """
        if not storage.is_decided(self.problem):  # without loads
            return dict.fromkeys(self.placements, "host")
        return storage.decide(self.problem, self.loads)

    @property
    def on_devices(self) -> Load:
        """What the tables on GPUs load the ranks with, `[W]`."""
        chosen = [
            self.loads[name]
            for name, place in self.storages.items()
            if place == "device"
        ]
        return sum(chosen, start=Load())

    @functools.cached_property
    def total(self) -> Load:
        """What all tables and the exchanges load the ranks with, `[W]`."""
        load = sum(self.loads.values(), start=Load())
        return balance.total(load, list(self.placements.values()), self.problem)

    @property
    def seconds_per_step(self) -> float:
        """Estimated time of the busiest rank's tables in a step."""
        return float(np.max(self.total.time(self.problem.setting)))
