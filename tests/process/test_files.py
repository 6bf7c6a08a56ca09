# SPDX-License-Identifier: Apache-2.0
"""Every way of Keras to save and to load, at two ranks, under both Kerases."""

import pytest
import scenarios

pytestmark = pytest.mark.process

KERAS_3 = scenarios.of(
    "files_scenarios", "file_callbacks_scenarios", "file_failures_scenarios"
)
TF_KERAS = scenarios.of("tf_keras_files_scenarios")


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [(2, 3, s) for s in KERAS_3] + [(2, 2, s) for s in TF_KERAS],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)
