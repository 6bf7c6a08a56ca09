# SPDX-License-Identifier: Apache-2.0
"""Times a restart after the death of a rank, from the kill to a new step.

A job under `tfdist-run --max-restarts` trains a table with Adagrad and saves by
`callbacks.Resume`. One rank is killed by SIGKILL some steps after a checkpoint.
The clock stops when all ranks have ended the first step that was never trained
before. First the job is checked: with a kill and without one it must come to
the same weights, bit by bit.

Columns: wall seconds of a phase, which ends when the last rank has ended it,
and processor seconds of the rank that took most. Survivors notice the death
during `others ended`. The last lines bound the seconds of a restart in which
the survivors keep their processes.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from benchmarks import run

_POLL_SECONDS = 0.005
# What all ranks do after a restart, by the event that ends it.
_EVENTS = {
    "started": "processes started",
    "imported": "imports",
    "met": "ranks met",
    "loaded": "own load",
    "built": "model built",
    "restored": "checkpoint restored",
}
_CHECK = {"rows": 2000, "steps": 120, "every": 40, "load_seconds": 0.0}


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a restart.

    Attributes:
        name: what is done.
        wall: seconds until the last rank has done it.
        cpu: processor seconds of the rank that took most.
    """

    name: str
    wall: float
    cpu: float = 0.0


@dataclasses.dataclass(frozen=True)
class Restart:
    """A measured restart.

    Attributes:
        noticed: seconds from the kill until the last survivor's error, None
            if the launcher ended one that had not noticed.
        phases: one after the other; their wall seconds add up to the whole.
        repeated: steps that were trained a second time.
    """

    noticed: float | None
    phases: tuple[Phase, ...]
    repeated: int

    @property
    def seconds(self) -> float:
        return sum(phase.wall for phase in self.phases)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.restart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="(2 4)")
    add("--rows", type=int, default=20_000, help="256 bytes each (20000)")
    add(
        "--load-seconds",
        type=float,
        default=0.0,
        help="processor seconds that each rank loads by itself before fit (0)",
    )
    add("--every", type=int, default=200, help="steps per checkpoint (200)")
    add("--lost", type=int, default=20, help="steps after it, then kill (20)")
    add("--rounds", type=int, default=3, help="medians of so many (3)")
    add("--limit", type=float, default=300.0, help="seconds per job (300)")
    add("--no-check", action="store_true", help="leave the comparison out")
    add("--output", type=pathlib.Path, default=pathlib.Path("build/bench"))
    return parser


class Job:
    """A job under `tfdist-run`, gone at the end of the block.

    Args:
        folder: new folder for all that the job writes.
        ranks: how many.
        options: of `restart_rank`.
        limit: seconds until it must have ended.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        ranks: int,
        options: dict[str, Any],
        limit: float,
    ) -> None:
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps(options))
        self._folder, self._ranks = folder, ranks
        self._deadline = time.monotonic() + limit
        self._lines: list[tuple[float, str]] = []
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tfdist_ext.launch", "-n", str(ranks)),
                *("--max-restarts", "1", "-m", "benchmarks.restart_rank"),
                str(folder),
            ],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *args: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(10.0)
        text = "".join(line for _, line in self._lines)
        (self._folder / "log").write_text(text)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append((time.monotonic(), line))

    def kill_rank(self, lost: int) -> float:
        """Kills the last rank `lost` steps after a checkpoint; returns when."""
        rank = self._ranks - 1
        while True:
            saved = [
                int(path.stem.split("-")[1])
                for path in (self._folder / "run").glob("ckpt-*.index")
            ]
            if saved and self._last_step(0, rank) >= max(saved) + lost:
                break
            self._wait()
        now = time.monotonic()
        os.kill(self.events(0, rank)[0]["pid"], signal.SIGKILL)
        return now

    def said(self, text: str) -> float:
        """Waits until the launcher has said something; returns when it did."""
        while True:
            for when, line in list(self._lines):
                if line.startswith("tfdist-run: ") and text in line:
                    return when
            self._wait()

    def wait_for_step(self, step: int) -> None:
        """Waits until all ranks have ended a step after the restart."""
        for rank in range(self._ranks):
            while self._last_step(1, rank) < step:
                self._wait()

    def finish(self) -> list[str]:
        """Waits for the end; the digests of the weights of all ranks."""
        while self._process.poll() is None:
            self._wait()
        if self._process.returncode:
            raise RuntimeError(f"the job failed, see {self._folder}/log")
        return [
            (self._folder / f"digest-{rank}").read_text()
            for rank in range(self._ranks)
        ]

    def events(self, start: int, rank: int) -> list[dict[str, Any]]:
        """What a rank has noted in one of its starts."""
        path = self._folder / f"events-{start}-{rank}"
        if not path.exists():
            return []
        text = path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in text.splitlines()]

    def _last_step(self, start: int, rank: int) -> int:
        """The last step that a rank has ended, -1 before the first."""
        path = self._folder / f"events-{start}-{rank}"
        if not path.exists():
            return -1
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 300))
            lines = file.read().rpartition(b"\n")[0].splitlines()
        last = json.loads(lines[-1]) if lines else {}
        return int(last["step"]) if last.get("event") == "step" else -1

    def _wait(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"not done in time, see {self._folder}/log")
        if self._process.poll() not in (None, 0):
            raise RuntimeError(f"the job failed, see {self._folder}/log")
        time.sleep(_POLL_SECONDS)


def check(folder: pathlib.Path, ranks: int, limit: float) -> None:
    """Compares the weights of a job that is killed once with those of another.

    Raises:
        RuntimeError: they differ, or a job failed.
    """
    with Job(folder / "straight", ranks, _CHECK, limit) as job:
        expected = job.finish()
    with Job(folder / "killed", ranks, _CHECK, limit) as job:
        job.kill_rank(lost=5)
        job.said("starts again")
        found = job.finish()
    if found != expected:
        raise RuntimeError(f"weights differ after a restart, see {folder}")


def measure(
    folder: pathlib.Path, arguments: argparse.Namespace, ranks: int
) -> Restart:
    """Kills a rank of one job, and measures until it trains again."""
    options = {
        "rows": arguments.rows,
        "steps": 1_000_000,
        "every": arguments.every,
        "load_seconds": arguments.load_seconds,
    }
    with Job(folder, ranks, options, arguments.limit) as job:
        killed = job.kill_rank(arguments.lost)
        failed, again = job.said(" failed: "), job.said("starts again")
        before = [job.events(0, rank) for rank in range(ranks)]
        trained = max(_steps(events)[-1] for events in before)
        job.wait_for_step(trained + 1)
        after = [job.events(1, rank) for rank in range(ranks)]
    return restart_of(killed, failed, again, before, after)


def restart_of(
    killed: float,
    failed: float,
    again: float,
    before: list[list[dict[str, Any]]],
    after: list[list[dict[str, Any]]],
) -> Restart:
    """Makes phases of events.

    Args:
        killed: when the last rank was killed.
        failed: when the launcher said so.
        again: when it had ended the others.
        before: events of each rank up to its end.
        after: those of the second start.

    Raises:
        RuntimeError: the second start did not go on from a checkpoint.
    """
    trained = max(_steps(events)[-1] for events in before)
    begun = {_of(events, "restored")["step"] for events in after}
    if begun == {0} or len(begun) != 1:
        raise RuntimeError(f"ranks went on from steps {sorted(begun)}")
    noticed = [
        e["wall"] for ev in before[:-1] for e in ev if e["event"] == "noticed"
    ]
    first = begun.pop() + 1
    ends = [[_of(events, name) for events in after] for name in _EVENTS] + [
        [_of(events, "step", step) for events in after]
        for step in (first, max(first, trained), max(first, trained + 1))
    ]
    names = [*_EVENTS.values(), "first step", "steps repeated", "new step"]
    phases = [
        Phase("launcher noticed", failed - killed),
        Phase("others ended", again - failed),
    ]
    wall, cpu = again, [0.0] * len(after)
    for name, found in zip(names, ends, strict=True):
        last = max(wall, *(event["wall"] for event in found))
        # The line of the start is written when all is imported.
        now = [0.0 if name == _EVENTS["started"] else e["cpu"] for e in found]
        used = max(b - a for a, b in zip(cpu, now, strict=True))
        phases.append(Phase(name, last - wall, max(used, 0.0)))
        wall, cpu = last, now
    return Restart(
        max(noticed) - killed if len(noticed) == len(before) - 1 else None,
        tuple(phases),
        trained - first + 1,
    )


def _steps(events: list[dict[str, Any]]) -> list[int]:
    return [e["step"] for e in events if e["event"] == "step"]


def _of(
    events: list[dict[str, Any]], name: str, step: int | None = None
) -> dict[str, Any]:
    return next(
        e
        for e in events
        if e["event"] == name and (step is None or e["step"] == step)
    )


def median_of(restarts: list[Restart]) -> Restart:
    """The median of each phase."""
    middle = statistics.median
    noticed = [r.noticed for r in restarts if r.noticed is not None]
    return Restart(
        middle(noticed) if noticed else None,
        tuple(
            Phase(
                phases[0].name,
                middle(phase.wall for phase in phases),
                middle(phase.cpu for phase in phases),
            )
            for phases in zip(*(r.phases for r in restarts), strict=True)
        ),
        int(middle(r.repeated for r in restarts)),
    )


def bounds(restart: Restart, ranks: int) -> dict[str, float]:
    """The least seconds of restarts in which survivors keep their processes.

    They favour the survivors, who are ready before a replacement is and need no
    tracing before it. Where ranks share cores, what one rank computes by itself
    takes less time by as much.

    Args:
        restart: one of today.
        ranks: of the job, all on this host.

    Returns:
        Seconds by what the survivors would do.
    """
    wall = {phase.name: phase.wall for phase in restart.phases}
    share = min(1.0, len(os.sched_getaffinity(0)) / ranks)
    read, build = wall["checkpoint restored"], wall["model built"]
    noticed = wall["launcher noticed"] + wall["processes started"]
    alone = wall["imports"] + wall["own load"] + build + wall["first step"]
    trained = wall["steps repeated"] + wall["new step"]
    replaced = noticed + share * alone + wall["ranks met"] + trained
    fewer = noticed + wall["ranks met"] + build + wall["first step"] + trained
    return {
        "replacement, checkpoint at one rank's rate": replaced + read,
        "replacement, alone at the disk's rate": replaced + read / ranks,
        "no replacement, checkpoint at a rank's rate": (
            fewer + read * ranks / (ranks - 1)
        ),
        "no replacement, checkpoint at the disk's rate": fewer + read,
    }


def show(restart: Restart, ranks: int) -> None:
    """Prints a table of one number of ranks."""
    print(f"{'':<48}{'wall s':>8}{'cpu s':>8}")
    for phase in restart.phases:
        print(f"{phase.name:<48}{phase.wall:>8.2f}{phase.cpu:>8.2f}")
    print(f"{'from death to a new step':<48}{restart.seconds:>8.2f}")
    if restart.noticed is not None:
        print(f"{'(survivors noticed)':<48}{restart.noticed:>8.2f}")
    print(f"(steps repeated: {restart.repeated})")
    for name, seconds in bounds(restart, ranks).items():
        factor = restart.seconds / seconds
        print(f"{name:<48}{seconds:>8.2f}  factor {factor:.2f}")
    sys.stdout.flush()


def main() -> None:
    """Measures all numbers of ranks, prints a table for each."""
    run.exit_on_signals()
    arguments = make_parser().parse_args()
    folder = run.new_folder(arguments.output, "restart").resolve()
    records = []
    for ranks in arguments.ranks:
        if not arguments.no_check:
            check(folder / f"check-{ranks}", ranks, arguments.limit)
        restarts = [
            measure(folder / f"{ranks}-{turn}", arguments, ranks)
            for turn in range(arguments.rounds)
        ]
        restart = median_of(restarts)
        load = " ".join(f"{each:.2f}" for each in os.getloadavg())
        print(
            f"\n{ranks} ranks, {arguments.rows} rows, own load "
            f"{arguments.load_seconds:g} s; load average {load}"
        )
        show(restart, ranks)
        print(
            "each:", *(f"{each.seconds:.2f}" for each in restarts), flush=True
        )
        records.append(
            {
                "ranks": ranks,
                "restarts": [dataclasses.asdict(each) for each in restarts],
            }
        )
    (folder / "result.json").write_text(json.dumps(records, indent=2) + "\n")
    print(f"logs and result.json: {folder}")


if __name__ == "__main__":
    main()
