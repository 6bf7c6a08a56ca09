# SPDX-License-Identifier: Apache-2.0
"""Sparse layers in a `tf.function`, `tf.cond` or `tf.map_fn` of a model."""

import pytest
import scenarios

pytestmark = pytest.mark.process

SCENARIOS = scenarios.of("nested_graph_scenarios")


CASES = [(2, keras, scenario) for keras in (3, 2) for scenario in SCENARIOS]
ON_ONE_RANK = scenarios.only(SCENARIOS, {"training"})


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"), CASES + [(1, 3, s) for s in ON_ONE_RANK]
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)
