# SPDX-License-Identifier: Apache-2.0
"""Programs by name, each with the verdict that it must have."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import re
from collections.abc import Callable
from typing import Any

EQUAL = "equal"
WARNED = "warned"
REFUSED = "refused"
VERDICTS = (EQUAL, WARNED, REFUSED)
BATCHES = ("even", "uneven")
FOLDER = pathlib.Path(__file__).parent / "programs"


@dataclasses.dataclass(frozen=True)
class Program:
    """A small program that is compared with one process.

    Attributes:
        name: "group/name", unique.
        run: what trains; it is called with a `Context` and returns arrays by
            name.
        verdict: what several ranks must do with it.
        says: a regular expression that the warning or the error must match:
            the name of the culprit, or the remedy.
        kerases: which Kerases it is for; 3 and 2 (tf_keras).
        tables: whether it is run without tables (False), with them (True).
        batches: "even" batches of a fixed size, "uneven" ones.
        tolerance: the largest relative error of an equal number.
        alone: the verdict at one rank.
        family: whether it is one of many that differ in a name only.
        sizes: numbers of ranks that it is run at.
        needs: a package that it needs and that may not be installed.
        drawn: whether it draws random numbers that make its numbers differ,
            or leave them equal by chance.
    """

    name: str
    run: Callable[[Any], dict[str, Any]]
    verdict: str = EQUAL
    says: str = ""
    kerases: tuple[int, ...] = (3, 2)
    tables: tuple[bool, ...] = (False, True)
    batches: tuple[str, ...] = BATCHES
    tolerance: float = 5e-5
    alone: str = EQUAL
    family: bool = False
    sizes: tuple[int, ...] = (1, 2, 3)
    needs: str = ""
    drawn: bool = False

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    @property
    def about(self) -> str:
        """What the program does, in one line."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]

    def verdict_at(self, ranks: int) -> str:
        """The verdict at a number of ranks."""
        return self.verdict if ranks > 1 else self.alone


_PROGRAMS: dict[str, Program] = {}


def program(
    name: str, verdict: str = EQUAL, **how: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as a program.

    Args:
        name: "group/name".
        verdict: see `Program`.
        **how: more of `Program`.
    """

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in _PROGRAMS, f"two programs have the name {name}"
        assert verdict in VERDICTS, verdict
        assert verdict == EQUAL or how.get("says"), f"{name}: what is said?"
        _PROGRAMS[name] = Program(name, run, verdict, **how)
        return run

    return register


def programs(only: str = "") -> dict[str, Program]:
    """All programs, or those whose names a regular expression finds."""
    for path in sorted(FOLDER.glob("*.py")):
        importlib.import_module(f"tests.numbers.programs.{path.stem}")
    return {
        name: each
        for name, each in sorted(_PROGRAMS.items())
        if re.search(only, name)
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """A program in one of its settings.

    Attributes:
        name: of the program.
        keras: 3 or 2 (tf_keras).
        tables: whether its first layer is a table, partitioned at our ranks.
        batches: "even" or "uneven".
    """

    name: str
    keras: int
    tables: bool
    batches: str

    def __str__(self) -> str:
        tables = "tables" if self.tables else "plain"
        return f"{self.name}-{tables}-{self.batches}-keras{self.keras}"


def settings_of(each: Program, keras: int) -> list[Case]:
    """All settings of a program in one Keras."""
    if keras not in each.kerases:
        return []
    return [
        Case(each.name, keras, tables, batches)
        for tables in each.tables
        for batches in each.batches
    ]
