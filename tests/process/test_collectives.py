# SPDX-License-Identifier: Apache-2.0
"""Collectives between processes, from connecting to leaving."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

HERE = pathlib.Path(__file__).parent


def test_exchanges_between_processes(tmp_path):
    world_size = 4
    env = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": str(HERE.parent.parent),
    }
    program = str(HERE / "collective_program.py")
    ranks = []
    try:
        for rank in range(world_size):
            ranks.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        program,
                        *map(str, [rank, world_size, tmp_path]),
                    ],
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        for process in ranks:
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, output[-5000:]
    finally:
        for process in ranks:
            process.kill()
    counts = [
        json.loads((tmp_path / f"done.{rank}").read_text())
        for rank in range(world_size)
    ]
    sent, received = map(sum, zip(*counts, strict=True))
    assert sent == received
    # Per rank at least 2 (W-1)/W of the sums, 400 kB in each of 20 steps.
    least = 20 * 400_000 * 2 * (world_size - 1)
    assert least < sent < 1.2 * least
