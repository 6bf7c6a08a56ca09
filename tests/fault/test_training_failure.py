# SPDX-License-Identifier: Apache-2.0
"""A rank that dies or hangs in `fit` ends the job everywhere, with a name."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.ranks.servers import ENTER
from tfdist_ext.comm import listener

pytestmark = pytest.mark.fault

PROGRAM = pathlib.Path(__file__).with_name("training_rank.py")
START_LIMIT = 150
DETECTION_LIMIT = 10
GROUP_TIMEOUT = 3


@contextlib.contextmanager
def training(servers, world_size, folder, what):
    """Ranks that train or search, as a list of processes."""
    common = servers.environment(3, world_size)
    with listener.reserve_ports(world_size, "127.0.0.1") as reserved:
        workers = [f"127.0.0.1:{port}" for port in reserved]
        ranks = []
        for rank in range(world_size):
            task = {"type": "worker", "index": rank}
            config = {"cluster": {"worker": workers}, "task": task}
            env = {
                **common,
                "TF_CONFIG": json.dumps(config),
                "TFDIST_PORT_IS_HELD": "1",
                "TFDIST_TEST_PID": str(folder / f"pid.{rank}"),
            }
            program = [ENTER, PROGRAM, folder, GROUP_TIMEOUT, what]
            with open(folder / f"output.{rank}", "w") as output:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, program)],
                        env=env,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            wait_for(folder, "ready", range(world_size), START_LIMIT)
            yield ranks, workers
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def wait_for(folder, stem, ranks, limit):
    deadline = time.time() + limit
    paths = [folder / f"{stem}.{rank}" for rank in ranks]
    while not all(path.exists() for path in paths):
        if time.time() > deadline:
            outputs = [p.read_text()[-3000:] for p in folder.glob("output.*")]
            raise AssertionError(f"{stem} is missing\n" + "\n".join(outputs))
        time.sleep(0.02)
    return paths


KILL, STOP = (signal.SIGKILL, 0), (signal.SIGSTOP, GROUP_TIMEOUT)


@pytest.mark.parametrize(
    ("what", "victim", "how"),
    [
        *(("fit", victim, how) for how in (KILL, STOP) for victim in (0, 1)),
        ("search", 1, KILL),
    ],
)
def test_survivors_name_the_rank_and_end(servers, tmp_path, what, victim, how):
    end, wait = how
    with training(servers, 3, tmp_path, what) as (ranks, workers):
        start = time.time()
        os.kill(int((tmp_path / f"pid.{victim}").read_text()), end)
        survivors = [rank for rank in range(3) if rank != victim]
        paths = wait_for(
            tmp_path, "result", survivors, wait + DETECTION_LIMIT + 5
        )
        for path in paths:
            result = json.loads(path.read_text())
            assert result["class"] == "UnavailableError", result
            assert f"rank {victim} ({workers[victim]})" in result["message"]
            assert result["time"] - start <= wait + DETECTION_LIMIT
        for rank in survivors:
            assert ranks[rank].wait(30) != 0
