# SPDX-License-Identifier: Apache-2.0
"""Ranks that a Python program starts by `launch.notebook`."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

PROGRAM = pathlib.Path(__file__).with_name("notebook_program.py")
ROOT = PROGRAM.parents[2]


def run(ranks, keras, *what):
    """What the program prints in its last line; its other lines are right."""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environment["TF_USE_LEGACY_KERAS"] = "1" if keras == 2 else "0"
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{PROGRAM.parent}"
    done = subprocess.run(
        [sys.executable, PROGRAM, str(ranks), *what],
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *printed, last = done.stdout.splitlines()
    found = json.loads(last)
    losses, took_part = found["result"]
    assert took_part == list(range(ranks)) and len(losses) == 3
    assert losses[2] < losses[0]
    shown = [line for line in printed if line.endswith("prints é")]
    assert shown == ["rank 0 prints é"]
    return found


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3)])
def test_results_and_output(ranks, keras):
    run(ranks, keras, "result")


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (2, 2), (4, 3)])
def test_results_output_and_errors(ranks, keras):
    """The parent has used TensorFlow; a rank that fails ends the call."""
    found = run(ranks, keras)
    failed = f"rank {ranks - 1} of {ranks} failed: LookupError: the last rank"
    assert found["error"].startswith(failed)
    assert "in fail_on_last" in found["error"]  # its traceback
    assert "about to fail" in found["error"]  # its output
    assert "ended without an error of Python" in found["signal"]
    assert f"rank {ranks - 1} (pid" in found["signal"]
    assert "SIGKILL" in found["signal"]
    if importlib.util.find_spec("cloudpickle"):
        assert found["of main"] == 15
