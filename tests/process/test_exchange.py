# SPDX-License-Identifier: Apache-2.0
"""One exchange for all tables: shared, packed, bad ids."""

import pytest
import scenarios

pytestmark = pytest.mark.process

SCENARIOS = scenarios.of("exchange_scenarios", "prefetch_scenarios")
AT_FOUR_RANKS = scenarios.only(SCENARIOS, {"packed", "prefetch_keys"})


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [
        *((2, 3, s) for s in SCENARIOS),
        *((4, 3, s) for s in AT_FOUR_RANKS),
        *((2, 2, s) for s in scenarios.only(SCENARIOS, {"prefetch_keys"})),
    ],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)
