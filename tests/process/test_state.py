# SPDX-License-Identifier: Apache-2.0
"""Variables that steps assign: one value on all ranks, that of one process."""

import pytest

pytestmark = pytest.mark.process
RANKS = [(3, 3), (2, 2)]
ALL_EQUAL = ("RunningMean", "Counters", "Means", "Branching", "Teacher")
CASES = [
    *((name, {"samples": 17}) for name in ALL_EQUAL),
    ("Codebook", {}),
    ("RunningMean", {"run_eagerly": True}),
    ("Teacher", {"run_eagerly": True}),
]


@pytest.mark.parametrize(("ranks", "keras"), RANKS)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_state_equals_that_of_one_process(
    run_scenario, ranks, keras, name, options
):
    if options.get("run_eagerly"):
        options = {**options, "samples": 16 + ranks}
    (expected,) = run_scenario(
        "state_scenarios.of_one_process",
        *(name, options),
        ranks=1,
        keras=keras,
        strategy=False,
    )
    run_scenario(
        "state_scenarios.as_one_process",
        *(name, options, expected),
        ranks=ranks,
        keras=keras,
    )


@pytest.mark.parametrize(("ranks", "keras"), RANKS)
@pytest.mark.parametrize("name", ["OwnBranches", "Codebook"])
def test_ranks_have_equal_state(run_scenario, ranks, keras, name):
    """Even where each takes a branch of its own."""
    values = run_scenario(
        "state_scenarios.equal_on_ranks",
        *(name, {"samples": 17}),
        ranks=ranks,
        keras=keras,
    )
    assert all(value == values[0] for value in values)


@pytest.mark.parametrize(("ranks", "keras"), RANKS)
@pytest.mark.parametrize("name", ["Dropout", "Teacher"])
def test_equal_values_are_not_exchanged(run_scenario, ranks, keras, name):
    how = {"ranks": ranks, "keras": keras}
    assert set(run_scenario("state_scenarios.exchanges", name, **how)) == {0}


@pytest.mark.parametrize(("ranks", "keras"), RANKS)
def test_what_is_averaged_is_named_once(run_scenario, ranks, keras):
    how = {"ranks": ranks, "keras": keras}
    first, *others = run_scenario(
        "state_scenarios.named_once", "RunningMean", **how
    )
    (line,) = first
    assert "moving_mean" in line
    assert not any(others)
    first, *_ = run_scenario("state_scenarios.named_once", "Dropout", **how)
    assert not first


@pytest.mark.parametrize(("ranks", "keras"), RANKS)
@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_integers_need_an_aggregation(run_scenario, ranks, keras, dtype):
    run_scenario("state_scenarios.refused", dtype, ranks=ranks, keras=keras)
