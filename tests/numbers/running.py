# SPDX-License-Identifier: Apache-2.0
"""Runs programs on ranks that wait, each once, and judges them."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import pytest

from tests.numbers import judging
from tests.numbers import registry
from tests.ranks.pool import Pools

if TYPE_CHECKING:
    from tests.numbers.scenario import Outcome

_SCENARIO = "tests.numbers.scenario.run"
_LIMIT, _TIMEOUT = 90.0, 20.0  # Seconds of a program, and of an exchange.


class Runner:
    """Runs programs; remembers what one process finds.

    Args:
        pools: ranks, and processes without a strategy.
        folder: where programs may write.
        **options: of the strategy.
    """

    def __init__(
        self, pools: Pools, folder: pathlib.Path, **options: object
    ) -> None:
        self._pools = pools
        self._folder = folder
        self._options = {"timeout": _TIMEOUT, **options}
        self._stock: dict[registry.Case, Outcome] = {}

    def seen(
        self, each: registry.Program, case: registry.Case, ranks: int
    ) -> judging.Seen:
        """The verdict of a program in one setting at some ranks."""
        try:
            if case not in self._stock:
                (self._stock[case],) = self._run(case, 1, strategy=False)
            found = self._run(case, ranks, **self._options)
        except pytest.fail.Exception as error:
            return judging.Seen(judging.FAILED, where=f"no answer: {error}")
        seen = judging.judge(each, self._stock[case], found)
        if seen.verdict == judging.FAILED:  # perhaps in an exchange
            self._pools.kill(ranks, case.keras, **self._options)
        return seen

    def _run(
        self, case: registry.Case, ranks: int, **how: object
    ) -> list[Outcome]:
        folder = self._folder / f"{case}-{ranks}".replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        found: list[Outcome] = self._pools.run(
            *(_SCENARIO, folder, case),
            ranks=ranks,
            keras=case.keras,
            limit=_LIMIT,
            **how,
        )
        return found
