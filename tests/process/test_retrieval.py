# SPDX-License-Identifier: Apache-2.0
"""Retrieval over the candidates of all ranks is that of one process."""

import pytest
import scenarios

pytestmark = pytest.mark.process

SCENARIOS = scenarios.of("retrieval_scenarios")
# With layers and losses of Keras.
OF_KERAS = scenarios.only(
    SCENARIOS,
    {
        "tasks_are_those_of_one_process",
        "finds_what_towers_compute",
        "leaves_as_plain_ops",
    },
)


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [(4, 3, scenario) for scenario in SCENARIOS]
    + [(2, 2, scenario) for scenario in OF_KERAS],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)


CASES = [
    (2, 2, "basic"),
    (2, 2, "multitask"),
    (2, 2, "sequential"),
    (2, 2, "options"),
    (4, 3, "basic"),
    (2, 3, "sequential"),
]


@pytest.mark.parametrize(("ranks", "keras", "case"), CASES)
def test_ports_train_as_published(one_process, ranks, keras, case):
    one_process.check("retrieval_cases", case, ranks, keras)
