# SPDX-License-Identifier: Apache-2.0
"""Retrieval over the candidates of all ranks is that of one process."""

import pytest
import scenarios

pytestmark = pytest.mark.process

SCENARIOS = scenarios.of("retrieval_scenarios")
FAILURES = scenarios.of("retrieval_failures_scenarios")
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
    + [(2, 2, scenario) for scenario in OF_KERAS]
    + [(2, 3, scenario) for scenario in FAILURES],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (2, 2), (4, 3)])
def test_an_index_for_faiss(run_scenario, ranks, keras):
    pytest.importorskip("faiss", reason="needs pip install faiss-cpu")
    run_scenario("faiss_scenarios.exports", ranks=ranks, keras=keras)
