# SPDX-License-Identifier: Apache-2.0
"""Times the start and the end of a job: what a rank needs beside its steps.

A small model trains a few steps, in one process with stock layers, in one
process of ours, and on ranks under `tfdist-run`, in turns. With `--quick` the
program keeps Python's garbage collector out of its imports and its exit.

Columns: processor seconds of a rank (all threads, mean of the ranks) until
TensorFlow and Keras are imported, until the strategy is created, until the
first step has been trained, and of the exit; wall seconds from the last rank
that has imported until all have met, and from the last trained step until the
launcher has ended. Medians of all rounds.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import run

Events = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Start:
    """Seconds of a job's start and end, see the columns.

    Attributes:
        imports: processor seconds of a rank until its imports are done.
        met: those of the strategy.
        first_step: those from then until the first step has been trained.
        exit: those of the exit.
        meeting: wall seconds until all ranks have met.
        end: wall seconds of the end.
    """

    imports: float
    met: float
    first_step: float
    exit: float
    meeting: float
    end: float

    @property
    def until_step(self) -> float:
        """Processor seconds of a rank until its first step."""
        return self.imports + self.met + self.first_step


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2], help="(2)")
    add("--rounds", type=int, default=5, help="medians of so many (5)")
    add("--quick", action="store_true", help="with the lines of the docs")
    add("--limit", type=float, default=300.0, help="seconds per job (300)")
    add("--output", type=pathlib.Path, default=pathlib.Path("build/bench"))
    return parser


def start_of(
    events: list[Events], ended: float, cpu: float, stock: bool = False
) -> Start:
    """What the events of a job say.

    Args:
        events: of each rank, as `start_rank` has noted them.
        ended: when the job had ended, as of `time.monotonic()`.
        cpu: processor seconds of all its processes.
        stock: whether there was no strategy to create.
    """
    found = [{e["event"]: e for e in each} for each in events]

    def used(event: str) -> float:
        return statistics.mean(each[event]["cpu"] for each in found)

    def last(event: str) -> float:
        return float(max(each[event]["wall"] for each in found))

    met = "imported" if stock else "met"
    return Start(
        imports=used("imported"),
        met=used(met) - used("imported"),
        first_step=used("first step") - used(met),
        exit=cpu / len(found) - used("trained"),
        meeting=last(met) - last("imported"),
        end=ended - last("trained"),
    )


def median_of(starts: list[Start]) -> Start:
    """The median of each column."""
    return Start(
        *(
            statistics.median(column)
            for column in zip(*map(dataclasses.astuple, starts), strict=True)
        )
    )


def measure(
    folder: pathlib.Path, ranks: int, arguments: argparse.Namespace
) -> Start:
    """Runs a job once.

    Args:
        folder: new folder of the job.
        ranks: how many; 0 for one process of stock, 1 for one of ours.
        arguments: the command line.

    Raises:
        RuntimeError: the job failed.
        subprocess.TimeoutExpired: it did not end in time.
    """
    folder.mkdir(parents=True)
    launcher = ["-m", "tfdist_ext.launch", "-n", str(ranks), "-m"]
    command = [sys.executable, *(launcher if ranks > 1 else ["-m"])]
    command += ["benchmarks.start_rank", str(folder)]
    command += ["--stock"] * (ranks == 0) + ["--quick"] * arguments.quick
    before = _children()
    with (folder / "log").open("wb") as log:
        result = subprocess.run(
            command,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=arguments.limit,
        )
    ended, cpu = time.monotonic(), _children() - before
    if result.returncode:
        raise RuntimeError(f"the job failed, see {folder}/log")
    events = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("events-*"))
    ]
    return start_of(events, ended, cpu, stock=ranks == 0)


def _children() -> float:
    """Processor seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measures all in turns, and prints a line for each."""
    run.exit_on_signals()
    arguments = make_parser().parse_args()
    folder = run.new_folder(arguments.output, "start")
    starts: dict[int, list[Start]] = {n: [] for n in (0, 1, *arguments.ranks)}
    for number in range(arguments.rounds):
        for ranks, found in starts.items():
            name = folder / f"{ranks}-{number}"
            found.append(measure(name, ranks, arguments))
    titles = ["imports", "met", "step", "sum", "exit", "meeting", "end"]
    print(f"{'':<14}", *(f"{title:>8}" for title in titles))
    for ranks, found in starts.items():
        each = median_of(found)
        name = f"{ranks} ranks" if ranks > 1 else "ours, alone"
        cells = [each.imports, each.met, each.first_step, each.until_step]
        cells += [each.exit, each.meeting, each.end]
        name = name if ranks else "stock, alone"
        print(f"{name:<14}", *(f"{cell:>8.2f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
