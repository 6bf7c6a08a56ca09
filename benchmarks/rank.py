# SPDX-License-Identifier: Apache-2.0
"""Entry of a rank process: `python -m benchmarks.rank JOB_FILE RANK`.

The harness writes the job file and sets TF_CONFIG. Ranks meet in the run
folder, not on the network under test: `barrier` and `agree` use files.
"""

import ctypes
import dataclasses
import importlib
import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.002

# Task of a job -> module with a function `run_rank(context) -> dict`.
TASKS = {
    "training": "benchmarks.training",
    "settings": "benchmarks.settings_rank",
    "parameter-server": "benchmarks.parameter_server",
    "fbgemm": "benchmarks.fbgemm",
    "collectives": "benchmarks.exchange_rates",
    "overhead": "benchmarks.tiny_dense",
    "vocabulary": "benchmarks.vocabulary_rank",
    "consistency": "benchmarks.consistency_rank",
}


class CheckError(Exception):
    """A variant computes something else than the reference."""


@dataclasses.dataclass(frozen=True)
class RankContext:
    """What a task knows about its job.

    Attributes:
        rank: index of this process.
        ranks: number of processes.
        hosts: address of every rank.
        interface: interface to count bytes on, or "".
        folder: the run folder, shared by all ranks.
        options: options of the task, JSON values.
        poll_seconds: how often to look whether others have come.
    """

    rank: int
    ranks: int
    hosts: tuple[str, ...]
    interface: str
    folder: pathlib.Path
    options: dict[str, Any]
    poll_seconds: float = _POLL_SECONDS

    def barrier(self, phase: str) -> None:
        """Waits until every rank has come to `phase` (a unique name).

        The harness ends ranks that wait in vain, so there is no limit here.
        """
        self._write(f"{phase}.{self.rank}.phase", "")
        for rank in range(self.ranks):
            self._read(f"{phase}.{rank}.phase")

    def agree(self, name: str, value: Any) -> Any:
        """Returns rank 0's `value` on every rank (`name` is unique)."""
        if self.rank == 0:
            self._write(f"{name}.agreed", json.dumps(value))
        return json.loads(self._read(f"{name}.agreed"))

    def _write(self, name: str, text: str) -> None:
        partial = self.folder / f".{name}.{self.rank}.partial"
        partial.write_text(text)
        partial.rename(self.folder / name)

    def _read(self, name: str) -> str:
        path = self.folder / name
        while not path.exists():
            time.sleep(self.poll_seconds)
        return path.read_text()


def load_context(job_file: str, rank: int) -> tuple[str, RankContext]:
    """Returns the task's name and the context of `rank`."""
    path = pathlib.Path(job_file)
    job = json.loads(path.read_text())
    context = RankContext(
        rank=rank,
        ranks=len(job["hosts"]),
        hosts=tuple(job["hosts"]),
        interface=job["interface"],
        folder=path.parent,
        options=job["options"],
    )
    return job["task"], context


def die_with_parent(harness: int) -> None:
    """Asks Linux to kill this process when its parent is gone.

    Args:
        harness: id of the harness's process, the parent or a parent of it. If
            it has ended before this call, this process is killed at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A process that has ended and was not waited for has no executable.
    if not pathlib.Path(f"/proc/{harness}/exe").exists():
        os.kill(os.getpid(), signal.SIGKILL)


def be_first_to_go() -> None:
    """Has Linux end this process, not another, when memory runs out.

    Stock keeps every table on every rank: `ads` on 4 ranks may need more
    than the machine has, and that must cost no more than the variant.
    """
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000")


def let_idle_threads_sleep() -> None:
    """Sets for every variant what ours sets where ranks share a host.

    Here they have an address each, so the strategy cannot tell.
    """
    # Loads TensorFlow, which takes seconds: not before `die_with_parent`.
    from tfdist_ext import tensorflow_internals

    tensorflow_internals.stop_spinning()


def main() -> None:
    """Runs the task and writes its result next to the job file."""
    job_file, rank, harness = sys.argv[1:]
    die_with_parent(int(harness))
    be_first_to_go()
    task, context = load_context(job_file, int(rank))
    if context.ranks > 1:
        let_idle_threads_sleep()
    result = importlib.import_module(TASKS[task]).run_rank(context)
    (context.folder / f"result.{context.rank}.json").write_text(
        json.dumps(result)
    )
    context.barrier("done")
    # TensorFlow's servers of several ranks wait for each other when they are
    # torn down, and some never return. Everything is written: leave.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
