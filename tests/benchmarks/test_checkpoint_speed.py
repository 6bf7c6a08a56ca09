# SPDX-License-Identifier: Apache-2.0
"""Speed of checkpoints beside `dd`, on a small table."""

import pytest


@pytest.mark.process
@pytest.mark.parametrize("sharding", ["row", "column"])
def test_what_is_written_is_read_and_timed(tmp_path, run_forking, sharding):
    done = run_forking(
        "tfdist_ext.launch",
        *("-n", 2, "-m", "benchmarks.checkpoint_speed"),
        *("--rows", 10_000, "--sharding", sharding, "--folder", tmp_path),
        ranks=2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("] ")[-1].split() for line in done.stdout.splitlines()]
    table = {line[0]: line[1:] for line in lines if line}
    for name in ("write", "read"):
        speed, of_dd, share, more = map(float, table[name])
        assert speed > 0 and of_dd > 0, done.stdout
        assert 0 < share < 10 and 0 <= more < 500, done.stdout
    assert not list(tmp_path.iterdir())
