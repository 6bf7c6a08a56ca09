# SPDX-License-Identifier: Apache-2.0
"""Keras's own tests of its trainer and callbacks pass on two ranks.

Some of them always; all of them, each on ranks of its own, with
TFDIST_TEST_EVERY_SIZE=1 (`make test-keras`). A test that fails or hangs ends
its ranks: the next one has others.
"""

import os

import pytest

from tests.keras_own import chosen
from tests.keras_own import one_test
from tfdist_ext.keras_internals import KERAS_3

EVERY = os.environ.get("TFDIST_TEST_EVERY_SIZE", "0") != "0"
# Seconds of a test. Ranks that wait for each other are ended before.
LIMIT, TIMEOUT = 240.0, 59.0


def found() -> dict[str, tuple[str, str]]:
    """The module and the name of each test, by its whole name."""
    tests = {}
    for module in chosen.MODULES if KERAS_3 else ():
        try:
            loaded = one_test.load(module)
        except ModuleNotFoundError:  # Not all versions bring their tests.
            continue
        for test in one_test.cases(loaded):
            tests[f"{module}.{test}"] = (module, test)
    return tests


ALL = found()


def always() -> list[str]:
    """The tests that are always run, by their whole names."""
    return [
        name
        for name, (module, test) in ALL.items()
        if test.partition(".test_")[2] in chosen.ALWAYS.get(module, ())
    ]


def runs() -> list[str]:
    names = list(ALL) if EVERY else always()
    return [name for name in names if name not in chosen.CANNOT_APPLY]


@pytest.mark.process
@pytest.mark.parametrize(
    ("ranks", "keras", "name"), [(2, 3, name) for name in runs()]
)
def test_keras_passes_its_own_test(run_scenario, ranks, keras, name):
    said = run_scenario(
        "tests.keras_own.one_test.run",
        *ALL[name],
        ranks=ranks,
        keras=keras,
        limit=LIMIT,
        fresh=EVERY,
        # Ranks for these alone: the tests change settings of Keras.
        timeout=TIMEOUT,
    )
    assert len(set(said)) == 1, f"the ranks differ: {said}"
    if said[0] != one_test.PASSED:
        pytest.skip(said[0].removeprefix("skipped: "))


@pytest.mark.skipif(not ALL, reason="this Keras has no tests")
def test_names_of_tests_are_right():
    listed = sum(map(len, chosen.ALWAYS.values()))
    assert len(always()) == listed
    unknown = set(chosen.CANNOT_APPLY) - set(ALL)
    assert not unknown, "these tests do not exist: remove them from the list"
    assert all(chosen.CANNOT_APPLY.values())
