# SPDX-License-Identifier: Apache-2.0
"""Events of ranks, and the file that Chrome and Perfetto read."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

# Kinds of events, each in a row of its own of every rank.
STEP, EXCHANGE, KERNEL = "step", "exchange", "kernel"
CALLBACK = "callback"
_LANES = {STEP: 0, EXCHANGE: 1, KERNEL: 100, CALLBACK: 200}
# At most so many exchanges of a rank overlap in a picture.
_MOST_LANES = 90


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that a rank has done.

    Attributes:
        rank: which one.
        kind: STEP, EXCHANGE, KERNEL or CALLBACK.
        name: of the step, the exchange or the op.
        start: in microseconds of the clock of all ranks.
        end: likewise.
        more: bytes, peers and so on.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


def write(
    path: str | os.PathLike[str], events: Sequence[Event], errors: list[float]
) -> None:
    """Writes a trace, into place at once.

    Args:
        path: of the file.
        events: of all ranks.
        errors: of the ranks' clocks, in microseconds.
    """
    first = min((event.start for event in events), default=0.0)
    rows: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        rows.append(_name("process_name", rank, 0, f"rank {rank}"))
        mine = [event for event in events if event.rank == rank]
        for event, lane in _in_lanes(mine):
            rows.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": lane,
                    "cat": event.kind,
                    "name": event.name,
                    "ts": round(event.start - first, 3),
                    "dur": round(event.end - event.start, 3),
                    "args": event.more,
                }
            )
        for kind, lane in _LANES.items():
            rows.append(_name("thread_name", rank, lane, f"{kind}s"))
    whole = {"traceEvents": rows, "clock_errors_us": errors}
    part = f"{os.fspath(path)}.part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(whole, file)
    os.replace(part, path)


def read(path: str | os.PathLike[str]) -> list[Event]:
    """The events of a file that `write` has written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    with open(path, encoding="utf-8") as file:
        whole = json.load(file)
    if not isinstance(whole, dict) or "clock_errors_us" not in whole:
        raise ValueError(
            f"'{os.fspath(path)}' is no trace of callbacks.Timeline."
        )
    return [
        Event(
            row["pid"],
            row["cat"],
            row["name"],
            row["ts"],
            row["ts"] + row["dur"],
            row["args"],
        )
        for row in whole["traceEvents"]
        if row["ph"] == "X"
    ]


def _in_lanes(events: Sequence[Event]) -> list[tuple[Event, int]]:
    """Events with rows such that those of a row do not overlap."""
    ends: dict[int, float] = {}
    found = []
    for event in sorted(events, key=lambda each: each.start):
        lane = first = _LANES[event.kind]
        while (
            ends.get(lane, event.start) > event.start
            and lane < first + _MOST_LANES
        ):
            lane += 1
        ends[lane] = event.end
        found.append((event, lane))
    return found


def _name(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {
        "ph": "M",
        "pid": rank,
        "tid": lane,
        "name": what,
        "args": {"name": name},
    }
