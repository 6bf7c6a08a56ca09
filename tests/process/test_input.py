# SPDX-License-Identifier: Apache-2.0
"""What Keras's loops read, at one and several ranks, under both Kerases."""

import pytest
import scenarios

pytestmark = pytest.mark.process

SCENARIOS = scenarios.of("input_scenarios")
AT_ONE_RANK = scenarios.only(
    SCENARIOS, {"generators", "datasets_of_generators", "no_data"}
)


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [(1, 3, scenario) for scenario in AT_ONE_RANK]
    + [(2, keras, s) for keras in (3, 2) for s in SCENARIOS],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)
