# SPDX-License-Identifier: Apache-2.0
"""Every program of the zoo has its verdict.

Each runs at 2 ranks in Keras 3, in one setting (of those that differ in a name
only, every second); some also at 1 or 3 ranks, or in tf_keras. With
TFDIST_TEST_EVERY_SIZE=1 (`make test-numbers`) each runs in all settings at 1, 2
and 3 ranks, models of libraries at 1, 2 and 4, in both Kerases.
"""

import os
import zlib

import pytest

from tests.numbers import registry
from tests.numbers import table
from tests.numbers.running import Runner

EVERY = os.environ.get("TFDIST_TEST_EVERY_SIZE", "0") != "0"
PROGRAMS = registry.programs()
# Ranks and the Keras of further cases: there a program once found a defect.
FURTHER = {"metric/step/sum_of_gathered": (2, 2)}


def cases() -> list:
    """Ranks, the Keras and the case of each test."""
    found = []
    for each in PROGRAMS.values():
        chosen = every_size(each) if EVERY else rotating(each)
        found += [
            pytest.param(*(ranks, case.keras, case), id=f"{case}-{ranks}ranks")
            for ranks, case in chosen
        ]
    return found


def every_size(each: registry.Program) -> list:
    """All settings at all sizes."""
    return [
        (ranks, case)
        for keras in each.kerases
        for case in registry.settings_of(each, keras)
        for ranks in each.sizes
    ]


def rotating(each: registry.Program) -> list:
    """One setting, and for some programs another one as well.

    Which is decided by the program's name, not by its neighbours.
    """
    number = zlib.crc32(each.name.encode())
    if each.family and number % 2:
        return []
    settings = registry.settings_of(each, each.kerases[0])
    found = [(2, settings[number // 7 % len(settings)])]
    if number % 5 == 0 and len(each.kerases) > 1:
        others = registry.settings_of(each, each.kerases[1])
        found.append((2, others[number // 11 % len(others)]))
    if number % 10 == 1 and 3 in each.sizes:
        found.append((3, settings[number // 13 % len(settings)]))
    if number % 20 == 2 and 1 in each.sizes:
        found.append((1, settings[number // 17 % len(settings)]))
    if each.name in FURTHER:
        ranks, keras = FURTHER[each.name]
        further = (ranks, registry.settings_of(each, keras)[0])
        found += [further] if further not in found else []
    return found


@pytest.fixture(scope="session")
def runner(pools, tmp_path_factory) -> Runner:
    """Remembers what one process finds."""
    return Runner(pools, tmp_path_factory.mktemp("numbers"))


@pytest.mark.parametrize(("ranks", "keras", "case"), cases())
def test_program_has_its_verdict(runner, ranks, keras, case):
    each = PROGRAMS[case.name]
    if each.needs:
        pytest.importorskip(each.needs)
    seen = runner.seen(each, case, ranks)
    assert seen.verdict == each.verdict_at(ranks), (
        f"{case} at {ranks} ranks: {seen.error:.3g} in {seen.where}; "
        f"said: {seen.said}"
    )


@pytest.mark.parametrize(
    "name",
    [
        "loss/rmse",
        "metric/step/mean_of_loss",
        "state/batch_normalization",
        "step/masked/mean",
        "sequence/ragged",
    ],
)
def test_unequal_slices_change_no_verdict(pools, tmp_path, name):
    ranks, balance = 3, [7, 2, 1]
    each = PROGRAMS[name]
    case = registry.settings_of(each, 3)[-1]
    runner = Runner(pools, tmp_path, balance=balance)
    seen = runner.seen(each, case, ranks)
    assert seen.verdict == each.verdict_at(ranks), (
        f"{case}: {seen.error:.3g} in {seen.where}; said: {seen.said}"
    )


def test_page_has_the_programs_and_their_verdicts():
    assert table.PAGE.read_text() == table.page(), (
        "Write it anew: python -m tests.numbers.table"
    )


def test_there_are_enough_programs():
    assert len(PROGRAMS) >= 200
    assert all(each.about for each in PROGRAMS.values())
