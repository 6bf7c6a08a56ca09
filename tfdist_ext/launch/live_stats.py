# SPDX-License-Identifier: Apache-2.0
"""The line of `tfdist-run --stats`, and the reports of ranks for it.

A rank writes its statistics into a file of its own, whose path is in its
environment. So no process waits for another, and the statistics of a rank that
hangs are old.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

# Variable with the path of a rank's file.
VARIABLE = "TFDIST_STATS_FILE"
# Seconds between two reports of a rank, and until it counts as silent.
SECONDS, _SILENT_SECONDS = 1.0, 5.0
# Smallest share of a step that others wait for a late rank.
_LATE = 0.05
# Difference of shares from which they are printed.
_UNEQUAL = 0.005


@dataclasses.dataclass(frozen=True)
class Figures:
    """Statistics of a rank so far.

    Attributes:
        began: time at which it began to count, in seconds of `time.monotonic`.
        time: time of these statistics, in seconds of `time.monotonic`.
        steps: steps of all loops that a strategy has run.
        bytes_sent: bytes sent to all ranks.
        waited: seconds that exchanges waited for other ranks, by the rank that
            came last.
        memory: bytes of memory in use.
        shares: current share of each rank in a batch.
        staleness: updates of this rank's rows and variables, by how many steps
            old the values were that they were computed from; the last number
            is that of more steps. Empty where ranks do not step alone.
    """

    began: float
    time: float
    steps: int = 0
    bytes_sent: int = 0
    waited: tuple[float, ...] = ()
    memory: int = 0
    shares: tuple[float, ...] = ()
    staleness: tuple[int, ...] = ()

    def since(self, before: Figures | None) -> Figures:
        """The difference to earlier statistics, with current memory and shares.

        Args:
            before: earlier statistics of the rank, or None. Statistics of an
                earlier strategy in the same process are ignored.
        """
        if before is None or before.began != self.began:
            none = (0.0,) * len(self.waited)
            before = Figures(self.began, self.began, waited=none)
        return Figures(
            self.began,
            self.time - before.time,
            self.steps - before.steps,
            self.bytes_sent - before.bytes_sent,
            tuple(
                now - then
                for now, then in zip(self.waited, before.waited, strict=True)
            ),
            self.memory,
            self.shares,
            tuple(
                now - then
                for now, then in itertools.zip_longest(
                    self.staleness, before.staleness, fillvalue=0
                )
            ),
        )


class RankFile:
    """The file of a rank, for writing.

    One process writes it. Processes that the rank starts have the same
    environment, and find the file locked.

    Raises:
        OSError: the file cannot be written, or another process writes it.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise

    def write(self, figures: Figures) -> None:
        """Replaces the contents of the file."""
        text = json.dumps(dataclasses.astuple(figures)).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))

    def close(self) -> None:
        """Empties the file, so that the rank is no longer watched."""
        os.ftruncate(self._file, 0)
        os.close(self._file)


def read(path: pathlib.Path, before: Figures | None) -> Figures | None:
    """The latest statistics of a rank.

    Args:
        path: path of the rank's file.
        before: earlier statistics, which are returned while the rank writes.

    Returns:
        The statistics; None if the rank has no strategy yet, or has closed it.
    """
    try:
        text = path.read_bytes()
    except OSError:
        return None
    try:
        found = json.loads(text)
        given: list[Any] = [
            tuple(each) if isinstance(each, list) else each for each in found
        ]
        return Figures(*given)
    except (ValueError, TypeError):
        return before if text else None


class LiveStats:
    """Prints a line about the ranks of this host at an interval.

    Args:
        folder: folder for the files of the ranks.
        ranks: ranks of this host.
        seconds: seconds between two lines.
        show: writes a line.
        json_path: path of a file to which each line is added as JSON; None for
            none.

    Raises:
        OSError: that file cannot be written.
    """

    def __init__(
        self,
        folder: str,
        ranks: Iterable[int],
        seconds: float,
        show: Callable[[str], None],
        json_path: str | None = None,
    ) -> None:
        self._json_path = json_path
        self._ended = False
        if json_path is not None:
            open(json_path, "a", encoding="utf-8").close()
        self._files = {
            rank: pathlib.Path(folder, f"rank-{rank}") for rank in ranks
        }
        self._seconds = seconds
        self._show = show
        self._due = time.monotonic() + seconds
        self._before: dict[int, Figures] = {}

    def environment(self, rank: int) -> dict[str, str]:
        """The variable with the path of a rank's file."""
        return {VARIABLE: str(self._files[rank])}

    def look(self, running: Iterable[int]) -> None:
        """Prints a line, if one is due.

        Args:
            running: the ranks that have not ended.
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._seconds
        found = {}
        for rank in running:
            figures = read(self._files[rank], self._before.get(rank))
            if figures is not None:
                found[rank] = figures
        ended = self._ended
        self._ended = not found and (ended or bool(self._before))
        if not (ended and self._ended):  # printed once
            self._show(line(self._before, found, now, self._ended))
        if self._json_path is not None:
            own = summary(self._before, found, now, self._ended)
            text = json.dumps({"time": time.time(), **own})
            # If the disk is full, the ranks go on.
            with (
                contextlib.suppress(OSError),
                open(self._json_path, "a", encoding="utf-8") as file,
            ):
                file.write(f"{text}\n")
        self._before = found


def summary(
    before: Mapping[int, Figures],
    after: Mapping[int, Figures],
    now: float,
    ended: bool = False,
) -> dict[str, Any]:
    """What ranks have done between two lines.

    Args:
        before: statistics by rank, at the line before.
        after: statistics by rank, now.
        now: current time of `time.monotonic`.
        ended: whether there were statistics before.

    Returns:
        `state`: "starting", "running" or "ended"; while ranks run, also numbers
            as JSON values.
    """
    if not after:
        return {"state": "ended" if ended else "starting"}
    new = {rank: each.since(before.get(rank)) for rank, each in after.items()}
    spent = {rank: max(each.time, 1e-9) for rank, each in new.items()}
    rate = min(each.steps / spent[rank] for rank, each in new.items())
    slowest, wait = _slowest(new, rate)
    return {
        "state": "running",
        "ranks": sorted(after),
        "world_size": max(len(each.waited) for each in after.values()),
        "step": min(each.steps for each in after.values()),
        "steps_per_second": rate,
        "bytes_sent_per_second": sum(
            each.bytes_sent / spent[rank] for rank, each in new.items()
        ),
        "slowest_rank": slowest,
        "wait_ms_per_step": wait,
        "step_ms": 1e3 / rate if rate else None,
        "memory_bytes": {rank: each.memory for rank, each in new.items()},
        "shares": list(next(iter(new.values())).shares),
        "staleness": [
            sum(counts)
            for counts in itertools.zip_longest(
                *(each.staleness for each in new.values()), fillvalue=0
            )
        ],
        "silent_seconds": {
            rank: now - each.time
            for rank, each in after.items()
            if now - each.time > _SILENT_SECONDS
        },
    }


def line(
    before: Mapping[int, Figures],
    after: Mapping[int, Figures],
    now: float,
    ended: bool = False,
) -> str:
    """The result of `summary`, for the same arguments, as text."""
    found = summary(before, after, now, ended)
    if found["state"] == "starting":
        return "no rank has a strategy yet"
    if found["state"] == "ended":
        return "strategies are closed"
    rate, memory = found["steps_per_second"], found["memory_bytes"]
    most = max(memory, key=lambda rank: memory[rank])
    parts = [
        f"{rate:.{1 if rate >= 1 else 2}f} steps/s",
        f"{found['bytes_sent_per_second'] / 1e6:.3g} MB/s sent",
    ]
    if found["wait_ms_per_step"] is not None:
        slowest = found["slowest_rank"]
        of = f"{found['wait_ms_per_step']:.1f} of {found['step_ms']:.1f} ms"
        parts.append(
            f"no rank late (waits {of} per step)"
            if slowest is None
            else f"slowest rank {slowest} (others wait {of} per step)"
        )
    parts.append(
        f"memory {sum(memory.values()) / 1e9:.2f} GB"
        f" ({memory[most] / 1e9:.2f} on rank {most})"
    )
    shares = found["shares"]
    if shares and max(shares) - min(shares) >= _UNEQUAL:
        each = "/".join(f"{100 * share:.0f}" for share in shares)
        parts.append(f"shares {each} %")
    stale = found["staleness"]
    if sum(stale[1:]):
        each = "/".join(f"{100 * count / sum(stale):.0f}" for count in stale)
        parts.append(f"updates 0/1/... steps old: {each} %")
    parts += [
        f"rank {rank} silent for {seconds:.0f} s"
        for rank, seconds in found["silent_seconds"].items()
    ]
    size, some = found["world_size"], ""
    if len(after) < size:
        some = f"{named(found['ranks'])} of {size}, "
    return f"{some}step {found['step']}: {', '.join(parts)}"


def _slowest(
    new: Mapping[int, Figures], rate: float
) -> tuple[int | None, float | None]:
    """The rank that others wait for, as far as known on this host.

    Returns:
        The rank, None if no rank is late; and milliseconds per step that the
        others wait, None if unknown.
    """
    size = max(len(each.waited) for each in new.values())
    if size < 2 or not rate:
        return None, None
    # A late rank delays ranks, for which again others wait. A rank that is
    # delayed waits as long as others wait for it; the slow rank itself does not
    # wait. So each rank's own waiting is subtracted.
    blamed = [
        sum(each.waited[rank] / each.steps for each in new.values())
        for rank in range(size)
    ]
    for rank, each in new.items():
        blamed[rank] -= sum(each.waited) / each.steps
    slowest = max(range(size), key=lambda rank: blamed[rank])
    others = [
        sum(each.waited) / each.steps
        for rank, each in new.items()
        if rank != slowest
    ]
    wait = statistics.mean(others) if others else 0.0
    # Exchanges that wait at the same time are each counted.
    wait = min(wait, 1 / rate)
    return slowest if wait * rate >= _LATE else None, 1e3 * wait


def named(ranks: list[int]) -> str:
    """Numbers of ranks, in order, as in "ranks 1 to 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
