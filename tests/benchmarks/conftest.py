# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the benchmarks' tests."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.ranks.servers import ENTER
from tests.ranks.servers import Servers

# A command whose interpreter of ranks is another one.
_PROGRAM = """
import runpy, sys
sys.executable, *sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
RunForking = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_forking(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> RunForking:
    """Runs a benchmark's command with ranks that need not load TensorFlow."""
    python = tmp_path_factory.mktemp("forking") / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ENTER}" "$@"\n')
    python.chmod(0o700)

    def run(
        module: str, *arguments: object, ranks: int
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(python), module]
            + [str(argument) for argument in arguments],
            env=servers.environment(3, ranks),
            capture_output=True,
            text=True,
            timeout=600,
        )

    return run
