# SPDX-License-Identifier: Apache-2.0
"""The line of `tfdist-run --stats`, and what ranks report for it.

A rank writes its figures into a file of its own, which its environment names:
nobody waits for anybody, and a rank that hangs is one whose figures grow old.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

# Names the file of a rank.
VARIABLE = "TFDIST_STATS_FILE"
# Between two reports of a rank, and until it counts as silent.
SECONDS, _SILENT_SECONDS = 1.0, 5.0
# A rank for which others wait a smaller share of a step is not late.
_LATE = 0.05


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a rank has done so far.

    Attributes:
        began: when it began to count, in seconds of `time.monotonic`.
        time: of these figures, likewise.
        steps: of any loop that a strategy has run.
        bytes_sent: to all ranks.
        waited: seconds of waiting for others to come to an exchange, by the
            rank that came last.
        memory: in bytes, in use.
    """

    began: float
    time: float
    steps: int = 0
    bytes_sent: int = 0
    waited: tuple[float, ...] = ()
    memory: int = 0

    def since(self, before: Figures | None) -> Figures:
        """The difference to earlier figures, with the memory of now.

        Args:
            before: of the rank, or None. Those of what ran before in the same
                process count for nothing.
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
        )


class RankFile:
    """A rank's file, for writing.

    One process writes it: others that the rank starts, with its environment,
    find it locked.

    Raises:
        OSError: it cannot be written, or is another process's.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise

    def write(self, figures: Figures) -> None:
        """Replaces what the file says."""
        text = json.dumps(dataclasses.astuple(figures)).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))

    def close(self) -> None:
        """Leaves nothing: nobody is to wait for more of it."""
        os.ftruncate(self._file, 0)
        os.close(self._file)


def read(path: pathlib.Path, before: Figures | None) -> Figures | None:
    """What a rank has written last.

    Args:
        path: of its file.
        before: what it has written before, for the moment in which it writes.

    Returns:
        Its figures; None if it has no strategy yet, or no more.
    """
    try:
        text = path.read_bytes()
    except OSError:
        return None
    try:
        began, now, steps, sent, waited, memory = json.loads(text)
    except (ValueError, TypeError):
        return before if text else None
    return Figures(began, now, steps, sent, tuple(waited), memory)


class LiveStats:
    """Shows a line of the ranks of this host every some seconds.

    Args:
        folder: for the files of the ranks.
        ranks: of this host.
        seconds: between two lines.
        show: writes a line.
        json_path: of a file to which each line is added as JSON; None for
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
        """What tells a rank where to report."""
        return {VARIABLE: str(self._files[rank])}

    def look(self, running: Iterable[int]) -> None:
        """Shows a line if it is time for one.

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
        if not (ended and self._ended):  # said once
            self._show(line(self._before, found, now, self._ended))
        if self._json_path is not None:
            own = summary(self._before, found, now, self._ended)
            text = json.dumps({"time": time.time(), **own})
            # Of a disk that is full: the ranks go on.
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
    """What ranks have done between two looks.

    Args:
        before: by rank, at the look before.
        after: by rank.
        now: of `time.monotonic`.
        ended: whether there were figures once.

    Returns:
        `state`, "starting", "running" or "ended"; while ranks run, also
        figures that JSON can hold.
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
    """That of `summary`, with its arguments, as text."""
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
    """Which rank the others wait for, as far as ranks of this host know.

    Returns:
        The rank, None if no rank is late; and milliseconds per step that the
        others wait, None if nothing is known.
    """
    size = max(len(each.waited) for each in new.values())
    if size < 2 or not rate:
        return None, None
    # Late ranks make others late, for which yet others wait. These wait as
    # long as they are waited for, the rank that is slow does not wait.
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
