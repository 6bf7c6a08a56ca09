# SPDX-License-Identifier: Apache-2.0
"""Retrieval over the candidates of all ranks is that of one process."""

import pytest
import scenarios

pytestmark = pytest.mark.process

SCENARIOS = scenarios.of("retrieval_scenarios")


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("ranks", "keras"), [(3, 3), (2, 2)])
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)


CASES = [
    (2, 2, "basic"),
    (2, 2, "multitask"),
    (2, 2, "sequential"),
    (2, 2, "options"),
    (2, 3, "basic"),
    (4, 3, "sequential"),
]


@pytest.mark.parametrize(("ranks", "keras", "case"), CASES)
def test_ports_train_as_published(one_process, ranks, keras, case):
    one_process.check("retrieval_cases", case, ranks, keras)
