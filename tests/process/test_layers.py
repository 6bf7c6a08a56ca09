# SPDX-License-Identifier: Apache-2.0
"""What users do with layers and tables, at several ranks."""

import pytest
import scenarios

pytestmark = pytest.mark.process

SCENARIOS = scenarios.of(
    "copy_scenarios",
    "kernel_scenarios",
    "overlap_scenarios",
    "table_scenarios",
)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("ranks", "keras"), [(3, 3), (2, 2)])
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)
