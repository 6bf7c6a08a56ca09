# SPDX-License-Identifier: Apache-2.0
"""SSP and BAP: ranks step alone, and owners serve rows and variables."""

import numpy as np
import pytest
from scenarios import name_of_mode

pytestmark = pytest.mark.process

SSP = ["SSP", {"staleness": 2}]
BAP = ["BAP", {}]
CACHE = ["SSP", {"staleness": 3, "row_cache": True}]
INVERSE = ["BAP", {"stale_scale": "inverse"}]


@pytest.mark.parametrize(
    ("ranks", "keras", "mode", "in_loop"),
    [
        (2, 3, SSP, False),
        (2, 2, BAP, False),
        (2, 3, BAP, True),
        (2, 2, SSP, True),
        (3, 3, SSP, False),
        (2, 3, CACHE, False),
        (2, 2, CACHE, True),
        (3, 2, CACHE, False),
    ],
    ids=name_of_mode,
)
def test_updates_are_those_of_one_process(
    run_scenario, ranks, keras, mode, in_loop
):
    """Gradients that depend on no weights add up in any order."""
    scenario = "asynchronous_scenarios.linear"
    (expected,) = run_scenario(scenario, in_loop, False, ranks=1, keras=keras)
    for found in run_scenario(
        scenario, in_loop, True, ranks=ranks, keras=keras, consistency=mode
    ):
        for name, value in expected.items():
            # The last batch is smaller, and the parts of ranks are uneven.
            np.testing.assert_allclose(
                found[name], value, rtol=0.02, atol=0.02, err_msg=name
            )


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (2, 2), (3, 3)])
@pytest.mark.parametrize("sharding", ["row", "column"])
def test_copies_of_rows_are_not_too_old(run_scenario, ranks, keras, sharding):
    """Copies last for half of the bound; gradients wait for the other half."""
    mode = {"staleness": 4, "row_cache": True}
    sent = []
    for row_cache in (True, False):
        mode["row_cache"] = row_cache
        sent.append(0)
        for found in run_scenario(
            "asynchronous_scenarios.seen",
            sharding,
            ranks=ranks,
            keras=keras,
            consistency=["SSP", mode],
        ):
            updates = np.array(found["updates"])
            steps = np.arange(len(updates))
            # The last rank does not train the row in the first step.
            missing = np.minimum(steps, 1) / ranks
            assert (updates >= steps - missing - 4 - 1e-3).all(), updates
            sent[-1] += found["bytes of gradients"]
            # A copy is read until it is two steps old.
            assert (np.diff(updates)[found["hits"] == 1] == 0).all(), found
            assert found["hits"].sum() >= (8 if row_cache else 0), found
            # In the first step other ranks may count by their last batch.
            assert found["updates after the round"] == pytest.approx(
                len(updates) - 1 / ranks, abs=0.5
            )
    # What is left are mostly headers.
    assert 0 < sent[0] < 0.75 * sent[1], sent


@pytest.mark.parametrize(
    ("ranks", "keras", "mode", "optimizer", "of_keras", "options"),
    [
        (2, 3, SSP, "Adagrad", False, {}),
        (2, 2, SSP, "Adam", False, {"steps_per_execution": 2}),
        (2, 3, BAP, "Adam", True, {"steps_per_execution": 3}),
        (2, 2, INVERSE, "Adagrad", True, {}),
        (3, 3, INVERSE, "Adagrad", False, {}),
        (2, 3, CACHE, "Adagrad", False, {}),
        (2, 2, CACHE, "Adam", False, {"steps_per_execution": 3}),
    ],
    ids=name_of_mode,
)
def test_all_ranks_have_one_model_after_fit(
    run_scenario, ranks, keras, mode, optimizer, of_keras, options
):
    run_scenario(
        "asynchronous_scenarios.trained",
        *(optimizer, of_keras, options),
        ranks=ranks,
        keras=keras,
        consistency=mode,
    )


@pytest.mark.parametrize(
    ("ranks", "mode"), [(2, ["SSP", {"staleness": 0}]), (1, SSP), (1, BAP)]
)
def test_where_no_rank_can_be_ahead_it_is_bsp(run_scenario, ranks, mode):
    scenario = "consistency_scenarios.fitted"
    arguments = (4, "Adam", False, {})
    synchronous = run_scenario(scenario, *arguments, ranks=ranks, keras=3)
    found = run_scenario(
        scenario, *arguments, ranks=ranks, keras=3, consistency=mode
    )
    for one, other in zip(found, synchronous, strict=True):
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.parametrize("bound", [3, None])
def test_a_rank_runs_ahead_up_to_the_bound(run_scenario, bound):
    mode = BAP if bound is None else ["SSP", {"staleness": bound}]
    run_scenario(
        "asynchronous_scenarios.ahead",
        bound,
        ranks=2,
        keras=3,
        consistency=mode,
    )


@pytest.mark.parametrize(
    "what",
    [
        "loss",
        "clipnorm",
        "row_clip",
        "eager",
        "int8",
        "changed gradients",
        "gradient_dtype",
    ],
)
def test_what_needs_all_ranks_is_refused(run_scenario, what):
    run_scenario(
        "asynchronous_scenarios.refused",
        what,
        ranks=2,
        keras=3,
        consistency=SSP,
    )


@pytest.mark.parametrize(
    ("scenario", "mode", "keras", "arguments"),
    [
        ("a_rank_fails", SSP, 3, ()),
        ("a_rank_fails", BAP, 2, ()),
        ("a_bad_id", SSP, 3, ()),
        ("saved", BAP, 3, ()),
        ("saved", SSP, 2, ()),
        ("resumed", BAP, 3, ()),
        ("watched", SSP, 3, ()),
        ("guarded", SSP, 3, ()),
        ("guarded", CACHE, 3, ()),
        ("two_models", SSP, 3, ((2, 2),)),
        ("two_models", BAP, 2, ((2, 2),)),
        ("two_models", CACHE, 3, ((2, 4),)),
        ("a_rank_fails", CACHE, 3, ()),
        ("a_bad_id", CACHE, 3, ()),
        ("saved", CACHE, 3, ()),
        ("serial", CACHE, 3, ("Adam",)),
        ("averaged", BAP, 3, ()),
        ("scaled", INVERSE, 3, ()),
        ("averaged", SSP, 2, ()),
        ("serial", BAP, 3, ("Adam",)),
    ],
)
def test_scenario(run_scenario, scenario, mode, keras, arguments):
    run_scenario(
        f"asynchronous_scenarios.{scenario}",
        *arguments,
        ranks=2,
        keras=keras,
        consistency=mode,
    )
