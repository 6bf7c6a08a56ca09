# SPDX-License-Identifier: Apache-2.0
"""Training that watches itself, at several ranks, under both Kerases."""

import pytest
import scenarios

pytestmark = pytest.mark.process


EVERY = scenarios.of("watch_scenarios")
TF_KERAS = scenarios.only(EVERY, {"guard_rolls_back"})
AT_FOUR_RANKS = scenarios.only(EVERY, {"nan_leaves_the_state"})


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [
        (ranks, keras, scenario)
        for ranks, keras, some in (
            (2, 3, EVERY),
            (2, 2, TF_KERAS),
            (4, 3, AT_FOUR_RANKS),
        )
        for scenario in some
    ],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)
