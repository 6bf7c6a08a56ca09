# SPDX-License-Identifier: Apache-2.0
"""Disturbs a job at random, and looks that nothing is lost.

    python -m tests.fault.soak --minutes 60 --ranks 4 --seed 1

A job under `tfdist-run --max-restarts` is disturbed again and again: a rank is
killed, also while the ranks start, stopped, cut off, or told to end;
unauthenticated peers connect to rank 0 while the ranks start and send a byte at
a time; a rank starts with too few files to open; all ranks stand still and wake
up one after the other; the last checkpoint is torn; a disk is full, or slow.
Each time the cause must be named and training must go on, without a restart
where ranks survive. In the end the weights must be, bit by bit, those of a job
that nobody has disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import numpy as np

from tfdist_ext.saving import checkpoint_files

PROGRAM = pathlib.Path(__file__).with_name("soak_rank.py")
# A step's seconds while it is disturbed; that something must happen within.
STEP, LIMIT = 0.1, 300.0
EVERY = 5  # steps from checkpoint to checkpoint
AGAIN = "tfdist-run: starts again"


class Job:
    """A job that is disturbed.

    Args:
        launcher: the command line up to the program.
        environment: of the launcher.
        folder: for all that the job writes.
        ranks: how many.
        steps: that it trains.
        every: from checkpoint to checkpoint.
    """

    def __init__(
        self,
        launcher: list[str],
        environment: dict[str, str],
        folder: pathlib.Path,
        ranks: int,
        steps: int,
        every: int,
    ) -> None:
        folder.mkdir()
        self.folder, self.ranks = folder, ranks
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*launcher, *map(str, (PROGRAM, folder, steps, STEP, every))],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def last(self) -> checkpoint_files.Checkpoint:
        """The last checkpoint, full or not."""
        return next(
            iter(checkpoint_files.found_in(str(self.folder / "run"))),
            checkpoint_files.Checkpoint(0),
        )

    def step(self) -> int:
        """The step of the last checkpoint."""
        return self.last().step

    def goes_on(self, steps: int = 10) -> None:
        """Waits until some steps more have been saved, or all are trained."""
        first = self.step()
        self.wait(lambda: self.step() >= first + steps or self.ended())

    def wait(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition, as long as there are new checkpoints."""
        step, deadline = self.step(), time.monotonic() + LIMIT
        while not condition():
            if self.step() != step:
                step, deadline = self.step(), time.monotonic() + LIMIT
            assert time.monotonic() < deadline, self.text()[-6000:]
            time.sleep(0.05)

    def says(self, text: str, since: int) -> None:
        """Waits until the log names a cause."""
        self.wait(lambda: text in self.text()[since:])

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def signal(self, rank: int, number: int) -> None:
        pid = int((self.folder / f"pid-{rank}").read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def connect_to_rank_0(self) -> socket.socket:
        """Connects to the listener of rank 0 as soon as there is one."""
        file, connections = self.folder / "listener", []

        def connected() -> bool:
            with contextlib.suppress(OSError, ValueError):
                host, port = json.loads(file.read_text()).rsplit(":", 1)
                connections.append(socket.create_connection((host, int(port))))
            return bool(connections)

        self.wait(connected)
        return connections[0]

    def children(self) -> list[int]:
        """The processes that the launcher has started, by rank."""
        pid = self._process.pid
        text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return sorted(map(int, text.split()))

    def ended(self) -> bool:
        return self._process.poll() is not None

    def finish(self) -> list[np.ndarray]:
        """Lets the job come to its end; what it has trained."""
        (self.folder / "hurry").touch()
        self.wait(self.ended)
        assert self._process.returncode == 0, self.text()[-6000:]
        weights = np.load(self.folder / "weights.npz")
        return [weights[name] for name in weights.files]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def kill(job: Job, rank: int) -> str:
    job.signal(rank, signal.SIGKILL)
    return "failed: signal 9 (SIGKILL)"


def kill_at_start(job: Job, rank: int) -> str:
    """Kills a rank, and another one while all start again."""
    since = len(job.text())
    job.signal(rank, signal.SIGKILL)
    job.says(AGAIN, since)
    before = len(job.text())
    job.wait(lambda: len(job.children()) == job.ranks)
    os.kill(job.children()[rank], signal.SIGKILL)
    job.says(AGAIN, before)
    return "failed: signal 9 (SIGKILL)"


def drip(job: Job, rank: int) -> str:
    """Kills a rank while all start; peers without the secret send bytes."""
    hold = job.folder / "hold"
    hold.touch()
    (job.folder / "listener").unlink()
    job.signal(rank, signal.SIGKILL)
    peers = [job.connect_to_rank_0() for _ in range(20)]
    hold.unlink()

    def send() -> None:
        while peers:
            for peer in list(peers):
                try:
                    peer.send(b"t")
                except OSError:  # rank 0 has closed it
                    peers.remove(peer)
                    peer.close()
            time.sleep(0.2)

    threading.Thread(target=send, daemon=True).start()
    return "failed: signal 9 (SIGKILL)"


def suspend(job: Job, rank: int) -> str:
    """Stops all for longer than they wait; they wake up one by one."""
    for number in range(job.ranks):
        job.signal(number, signal.SIGSTOP)
    time.sleep(5)
    for number in range(job.ranks):
        job.signal(number, signal.SIGCONT)
        time.sleep(0.5)
    return ""


def stop(job: Job, rank: int) -> str:
    """Stands still for longer than the others wait; they name it."""
    job.signal(rank, signal.SIGSTOP)
    return f"rank {rank} (127.0.0.1:"


def cut(job: Job, rank: int) -> str:
    """Loses all its connections, and lives; the others name it."""
    (job.folder / f"cut-{rank}").touch()
    return f"rank {rank} (127.0.0.1:"


def tell(job: Job, rank: int) -> str:
    job.signal(rank, signal.SIGTERM)
    return "Resume: got SIGTERM; saved"


def tear(job: Job, rank: int) -> str:
    """Damages the last checkpoint, and lets it be needed."""
    for number in range(job.ranks):
        job.signal(number, signal.SIGSTOP)
    run = job.folder / "run"
    index = run / f"{job.last().name}.index"
    os.truncate(index, index.stat().st_size // 2)
    for number in range(job.ranks):
        job.signal(number, signal.SIGKILL)
    return f"{index.with_suffix('')}' cannot be read and is left out"


def full(job: Job, rank: int) -> str:
    (job.folder / f"full-{rank}").touch()
    return f"could not be written, training goes on without it: rank {rank}: "


def files(job: Job, rank: int) -> str:
    """Kills a rank, which starts again with too few files to open."""
    (job.folder / f"files-{rank}").touch()
    job.signal(rank, signal.SIGKILL)
    return "LimitNOFILE= of systemd"


def slow(job: Job, rank: int) -> str:
    (job.folder / f"slow-{rank}").touch()
    return ""


SURVIVED = (suspend, full, slow)
FAULTS = (kill, kill_at_start, drip, files, stop, cut, tell, tear, *SURVIVED)


def disturb(job: Job, fault: Callable[[Job, int], str], rank: int) -> None:
    """Does one thing to a job that trains, and waits until it trains again."""
    job.goes_on()
    since = len(job.text())
    if job.ended():
        return
    job.says(fault(job, rank), since)
    for kind in ("full", "slow", "cut"):
        for file in job.folder.glob(f"{kind}-*"):
            file.unlink(missing_ok=True)
    job.goes_on()
    if fault in SURVIVED:
        assert AGAIN not in job.text()[since:], job.text()[since:]


def soak(
    make: Callable[[str, int, int], Job],
    faults: list[Callable[[Job, int], str]],
    dice: random.Random,
    steps: int,
) -> None:
    """Disturbs one of two jobs, which must come to the same weights."""
    straight = make("straight", steps, 20 * EVERY)
    try:
        expected = straight.finish()
    finally:
        straight.kill()
    job = make("disturbed", steps, EVERY)
    try:
        for number, fault in enumerate(faults):
            rank = dice.randrange(job.ranks)
            print(
                f"{time.strftime('%H:%M:%S')} fault {number + 1}: "
                f"{fault.__name__} rank {rank} at step {job.step()}",
                flush=True,
            )
            disturb(job, fault, rank)
            assert not job.ended(), "the job ended before the faults did"
        found = job.finish()
    finally:
        job.kill()
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def launcher(ranks: int, restarts: int) -> list[str]:
    """The command that starts a job, without its program."""
    return [
        *(sys.executable, "-m", "tfdist_ext.launch", "-n", str(ranks)),
        *("--max-restarts", str(restarts), "--grace", "2"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    # As many as an hour has time for on two quiet cores: 200.
    count = max(1, int(options.minutes * 10 / 3))
    faults = [dice.choice(FAULTS) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:

        def make(name: str, steps: int, every: int) -> Job:
            path = pathlib.Path(folder, name)
            command = launcher(options.ranks, 2 * len(faults))
            environment = dict(os.environ)
            return Job(command, environment, path, options.ranks, steps, every)

        steps = int(options.minutes * 60 / STEP) // 20 * 20
        soak(make, faults, dice, steps)
    print(f"{len(faults)} faults, nothing lost")


if __name__ == "__main__":
    main()
