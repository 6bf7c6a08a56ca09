# SPDX-License-Identifier: Apache-2.0
"""Training that watches itself, at several ranks, under both Kerases."""

import pytest
import scenarios

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [
        (ranks, keras, scenario)
        for ranks, keras in ((2, 3), (2, 2), (4, 3))
        for scenario in scenarios.of("watch_scenarios")
    ],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)
