# SPDX-License-Identifier: Apache-2.0
"""Models leave the ranks as SavedModels that any TensorFlow serves."""

import os
import pathlib
import subprocess
import sys

import pytest
import scenarios

pytestmark = pytest.mark.process

PROGRAM = pathlib.Path(__file__).with_name("served_program.py")
SCENARIOS = scenarios.without(
    scenarios.of("serving_scenarios", "delta_scenarios"),
    {
        "for_another_process",
        "every_layer_in_16_bits",
        "requests_for_a_server",
    },
)


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [(2, 3, scenario) for scenario in SCENARIOS]
    + [
        (ranks, keras, f"serving_scenarios.{scenario}")
        for ranks, keras, scenario in (
            (1, 3, "every_layer"),
            (4, 3, "every_layer"),
            (2, 2, "every_layer_in_16_bits"),
        )
    ],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3)])
def test_process_without_this_package(run_scenario, tmp_path, ranks, keras):
    run_scenario(
        "serving_scenarios.for_another_process", ranks=ranks, keras=keras
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (2, 2)])
def test_requests_for_a_server(run_scenario, ranks, keras):
    pytest.importorskip(
        "tensorflow_serving", reason="needs pip install tensorflow-serving-api"
    )
    run_scenario(
        "serving_scenarios.requests_for_a_server", ranks=ranks, keras=keras
    )
