# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the examples' tests."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
sys.path.insert(0, str(EXAMPLES))

# What the launcher and the examples set for themselves.
_OWN = ("TF_CONFIG", "TF_USE_LEGACY_KERAS")


@pytest.fixture
def real_data() -> Callable[[str], pathlib.Path]:
    """Finds a folder of real data beside the repository, or skips."""

    def find(name: str) -> pathlib.Path:
        folder = REPOSITORY.parent / "shared" / "data" / name
        if not folder.is_dir():
            pytest.skip(f"real data '{name}' is not on this machine")
        return folder

    return find


@pytest.fixture
def run_example(tmp_path: pathlib.Path) -> Callable[..., str]:
    """Runs an example at a number of ranks and returns what it printed."""

    def run(script: str, *arguments: object, ranks: int = 1) -> str:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "tfdist_ext.launch", "-n", str(ranks)]
        command += [str(EXAMPLES / script), *map(str, arguments)]
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = {
            **{k: v for k, v in os.environ.items() if k not in _OWN},
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": str(tmp_path),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=600,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
