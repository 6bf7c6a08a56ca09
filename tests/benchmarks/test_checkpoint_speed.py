# SPDX-License-Identifier: Apache-2.0
"""Speed of checkpoints beside `dd`, on a small table."""

import subprocess
import sys

import pytest


@pytest.mark.process
@pytest.mark.parametrize("sharding", ["row", "column"])
def test_what_is_written_is_read_and_timed(tmp_path, sharding):
    program = ["benchmarks.checkpoint_speed", "--rows", "10000", "--warm"]
    options = ["--sharding", sharding, "--folder", str(tmp_path)]
    launch = [sys.executable, "-m", "tfdist_ext.launch", "-n", "2", "-m"]
    done = subprocess.run(
        [*launch, *program, *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warm reads" in done.stdout
    table = {
        line.split()[0]: line.split()[1:]
        for line in done.stdout.splitlines()
        if line.startswith(("write", "read"))
    }
    for name in ("write", "read"):
        speed, of_dd, share, more = map(float, table[name])
        assert speed > 0 and of_dd > 0, done.stdout
        assert share > 0 and 0 <= more < 500, done.stdout
    assert not list(tmp_path.iterdir())
