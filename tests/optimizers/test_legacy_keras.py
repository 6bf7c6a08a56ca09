# SPDX-License-Identifier: Apache-2.0
"""The tests of this folder once more, under tf_keras."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

FOLDER = pathlib.Path(__file__).parent
FILES = sorted(
    str(path)
    for path in FOLDER.glob("test_*.py")
    if path.name != pathlib.Path(__file__).name
)


@pytest.mark.skipif(
    not hasattr(tf.keras, "ops"), reason="this run is under tf_keras already"
)
@pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="needs tf_keras"
)
def test_under_tf_keras():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *FILES],
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
