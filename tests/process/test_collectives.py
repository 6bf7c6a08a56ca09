# SPDX-License-Identifier: Apache-2.0
"""Collectives between processes, from connecting to leaving."""

import json
import pathlib

import pytest

pytestmark = pytest.mark.process

PROGRAM = pathlib.Path(__file__).with_name("collective_program.py")


def test_exchanges_between_processes(run_ranks, tmp_path):
    world_size = 4
    run_ranks(PROGRAM, world_size, tmp_path)
    counts = [
        json.loads((tmp_path / f"done.{rank}").read_text())
        for rank in range(world_size)
    ]
    sent, received = map(sum, zip(*counts, strict=True))
    assert sent == received
    # Per rank at least 2 (W-1)/W of the sums, 400 kB in each of 20 steps.
    least = 20 * 400_000 * 2 * (world_size - 1)
    assert least < sent < 1.2 * least
