# SPDX-License-Identifier: Apache-2.0
"""Gradients of which some values are sent, at several ranks."""

import pathlib

import pytest
import scenarios

pytestmark = pytest.mark.process

EVERY = scenarios.of("compression_scenarios")
AT_THREE_RANKS = scenarios.only(
    EVERY, {"top_k", "random_k", "nothing_is_lost", "weighted_by_samples"}
)
TF_KERAS = scenarios.only(
    EVERY,
    {"optimizers", "weighted_by_samples", "checked", "bad_id", "in_turns"},
)
PROGRAM = pathlib.Path(__file__).with_name("compression_program.py")


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [
        (ranks, keras, scenario)
        for ranks, keras, some in (
            (2, 3, EVERY),
            (2, 2, TF_KERAS),
            (3, 3, AT_THREE_RANKS),
        )
        for scenario in some
    ],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)


@pytest.mark.parametrize("what", ["same", "different"])
def test_the_strategy_takes_it(run_ranks, what):
    run_ranks(PROGRAM, 2, what)
