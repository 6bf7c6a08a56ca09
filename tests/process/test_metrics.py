# SPDX-License-Identifier: Apache-2.0
"""Metrics of recommender systems are exact at every number of ranks."""

import pytest
import scenarios

pytestmark = pytest.mark.process

SCENARIOS = scenarios.of("metrics_scenarios")
REFUSED = "metrics_scenarios.many_samples_are_refused"


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [
        (ranks, keras, scenario)
        for ranks in (1, 2, 3)
        for keras in (3, 2)
        for scenario in SCENARIOS
        if scenario != REFUSED or ranks == 2
    ],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)
