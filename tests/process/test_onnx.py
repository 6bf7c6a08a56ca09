# SPDX-License-Identifier: Apache-2.0
"""Models leave the ranks as ONNX files, which onnxruntime runs."""

import pytest
import scenarios

pytestmark = pytest.mark.process

EVERY = scenarios.of("onnx_scenarios")
# It refuses models before they are converted.
REFUSALS = "onnx_scenarios.refusals"


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [
        (ranks, 3, scenario)
        for ranks in (1, 2)
        for scenario in EVERY
        if scenario != REFUSALS
    ]
    + [(2, 2, "onnx_scenarios.every_layer")],
)
def test_converted(run_scenario, ranks, keras, scenario):
    for package in ("tf2onnx", "onnx", "onnxruntime"):
        pytest.importorskip(package, reason="needs make test-onnx")
    run_scenario(scenario, ranks=ranks, keras=keras)


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (1, 3), (2, 2)])
def test_refused(run_scenario, ranks, keras):
    run_scenario(REFUSALS, ranks=ranks, keras=keras)
