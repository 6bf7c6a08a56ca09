# SPDX-License-Identifier: Apache-2.0
"""Traces of training: events, their file, and what bounds the steps.

The file has the format of Chrome and Perfetto. `tfdist-report` prints the
report.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

# Kinds of events; each kind has its own rows in a rank's part of the trace.
STEP, EXCHANGE, KERNEL = "step", "exchange", "kernel"
CALLBACK = "callback"
_LANES = {STEP: 0, EXCHANGE: 1, KERNEL: 100, CALLBACK: 200}
# Most rows for overlapping exchanges of a rank.
_MOST_LANES = 90


@dataclasses.dataclass(frozen=True)
class Event:
    """An event on a rank.

    Attributes:
        rank: number of the rank.
        kind: STEP, EXCHANGE, KERNEL or CALLBACK.
        name: name of the step, the exchange or the op.
        start: start in microseconds, by the common clock of all ranks.
        end: end in microseconds, by the same clock.
        more: bytes, peers and other values.
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
    """Writes a trace to a temporary file, then renames it.

    Args:
        path: path of the file.
        events: events of all ranks.
        errors: errors of the ranks' clocks, in microseconds.
    """
    first = min((event.start for event in events), default=0.0)
    rows: list[dict[str, object]] = []
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
    """The events in a file that `write` has written.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not such a trace.
    """
    with open(path, encoding="utf-8") as file:
        whole = json.load(file)
    if not isinstance(whole, dict) or "clock_errors_us" not in whole:
        raise ValueError(
            f"'{os.fspath(path)}' is not a trace of callbacks.Timeline."
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
    """Assigns rows to events, so that events of a row do not overlap."""
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


def _name(what: str, rank: int, lane: int, name: str) -> dict[str, object]:
    return {
        "ph": "M",
        "pid": rank,
        "tid": lane,
        "name": what,
        "args": {"name": name},
    }


def clock_offsets(
    sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    """Offsets of clocks to the clock of rank 0, and their largest errors.

    In a round every rank sends its time to all, and records when it has
    received the times of all. A message arrives after it was sent, so that a
    round bounds the difference of two clocks from both sides. The closest
    bounds of all rounds are used.

    >>> clock_offsets([[0, 1000]], [[30, 1010]])
    [(0.0, 0.0), (990.0, 20.0)]

    Args:
        sent: time at which each rank began to send, by its own clock; by round
            and rank.
        received: time at which each rank had received all; by round and rank.

    Returns:
        By rank, the offset to subtract from its clock, and the largest error.
    """
    result = [(0.0, 0.0)]
    for rank in range(1, len(sent[0])):
        # received[rank] >= sent[0] + offset, and vice versa.
        most = min(
            there[rank] - here[0]
            for here, there in zip(sent, received, strict=True)
        )
        least = max(
            here[rank] - there[0]
            for here, there in zip(sent, received, strict=True)
        )
        result.append(((most + least) / 2, (most - least) / 2))
    return result


# Prefixes of op names; ops without one of them are "other work".
_WORK = {
    "lookup": (
        "Tfdist>Lookup",
        "Tfdist>Pool",
        "Tfdist>Combine",
        "Tfdist>EncodeIds",
        "Tfdist>DecodeIds",
        "Tfdist>UniqueIds",
        "Tfdist>MergeIds",
        "Tfdist>AskKeys",
        "Tfdist>ReadRows",
        "GatherV2",
        "ResourceGather",
    ),
    "update": ("Tfdist>Apply", "Tfdist>Sum", "Tfdist>Scale", "ResourceApply"),
}
INPUT, LINK, WAITING, OTHER = "input", "link", "waiting", "other work"
IN_CALLBACKS = "callbacks"
_COLUMNS = (INPUT, "lookup", "update", OTHER, IN_CALLBACKS, LINK, WAITING)
# Prefixes of ops that wait for the input.
_READS = ("IteratorGetNext", "MultiDeviceIterator", "OneShotIterator")
_EXCHANGES = ("Tfdist>All", "Tfdist>Broadcast", "Tfdist>Barrier")


def report(events: Sequence[Event]) -> str:
    """A table of the time of a step by kind of work, and what bounds it.

    Args:
        events: events of all ranks.

    Returns:
        Text of several lines.
    """
    ranks = sorted({event.rank for event in events})
    steps = {
        rank: [e for e in events if e.rank == rank and e.kind == STEP]
        for rank in ranks
    }
    count = min(map(len, steps.values()), default=0)
    if not count:
        return "The trace has no steps."
    lengths = {
        rank: statistics.mean(e.end - e.start for e in found)
        for rank, found in steps.items()
    }
    spent = {rank: _spent(events, rank, count) for rank in ranks}
    late = _lateness(events, count)
    lines = [f"{count} steps, milliseconds per step:"]
    head = "".join(f"{name:>12}" for name in ["step", *_COLUMNS, "late"])
    lines.append(f"{'rank':>6}{head}")
    for rank in ranks:
        numbers = [
            lengths[rank],
            *(spent[rank][n] for n in _COLUMNS),
            late[rank],
        ]
        cells = "".join(f"{number / 1e3:>12.2f}" for number in numbers)
        lines.append(f"{rank:>6}{cells}")
    lines.append(_verdict(spent, late, max(lengths.values())))
    return "\n".join(lines)


def _verdict(
    spent: dict[int, dict[str, float]], late: dict[int, float], step: float
) -> str:
    """The last sentence of the report."""
    slowest = max(late, key=lambda rank: late[rank])
    work = {
        name: statistics.mean(each[name] for each in spent.values())
        for name in _COLUMNS
        if name != WAITING
    }
    most = max(work, key=lambda name: work[name])
    if late[slowest] > 0.1 * step and len(late) > 1:
        own = {k: v for k, v in spent[slowest].items() if k != WAITING}
        least = {
            name: min(each[name] for each in spent.values()) for name in own
        }
        why = max(own, key=lambda name: own[name] - least[name])
        return (
            f"Bound by rank {slowest}: the others wait for it "
            f"{late[slowest] / 1e3:.2f} ms of {step / 1e3:.2f} per "
            f"step. It spends more time than they do in: {why}."
        )
    return (
        f"Bound by {most}: {work[most] / 1e3:.2f} ms of {step / 1e3:.2f} per "
        "step; no rank is late."
    )


def _spent(events: Sequence[Event], rank: int, steps: int) -> dict[str, float]:
    """Microseconds per step by kind of work; parallel work counts once."""
    spans: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for event in events:
        if event.rank != rank or event.kind == STEP:
            continue
        if event.kind == KERNEL:
            if not event.name.startswith((*_EXCHANGES, *_READS)):
                spans[_work_of(event.name)].append((event.start, event.end))
            continue
        if event.kind == CALLBACK:
            spans[IN_CALLBACKS].append((event.start, event.end))
            continue
        waited = event.more.get("waited_us", 0.0)
        spans[LINK].append((event.start + waited, event.end))
        spans[WAITING].append((event.start, event.start + waited))
    spans[INPUT] = _before_work([e for e in events if e.rank == rank])
    return {name: _covered(spans.get(name, ())) / steps for name in _COLUMNS}


def _before_work(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Spans from the starts of a rank's steps to their first op or exchange.

    Callbacks at the begin of a step are not included.
    """
    steps = [event for event in events if event.kind == STEP]
    begins = {step.start for step in steps}
    after = {
        event.start: event.end
        for event in events
        if event.kind == CALLBACK and event.start in begins
    }
    starts = sorted(
        event.start
        for event in events
        if event.kind != STEP
        and not (event.kind == CALLBACK and event.start in begins)
        and not event.name.startswith(_READS)
    )
    found = []
    for step in steps:
        begin = after.get(step.start, step.start)
        place = bisect.bisect_left(starts, begin)
        first = starts[place] if place < len(starts) else step.end
        found.append((begin, max(begin, min(first, step.end))))
    return found


def _work_of(name: str) -> str:
    for work, beginnings in _WORK.items():
        if name.startswith(beginnings):
            return work
    return OTHER


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The time that at least one of the spans covers."""
    total = end = 0.0
    for first, last in sorted(spans):
        total += max(last - max(first, end), 0.0)
        end = max(end, last)
    return total


def waits(events: Sequence[Event]) -> dict[int, tuple[float, int]]:
    """Microseconds that each exchange waited for the last rank.

    Returns:
        The microseconds and the rank that came last, by the id of the event.
    """
    found = {}
    for group in _grouped(events):
        last = max(group, key=lambda event: event.start)
        for event in group:
            waited = min(last.start, event.end) - event.start
            found[id(event)] = max(waited, 0.0), last.rank
    return found


def _grouped(events: Sequence[Event]) -> list[list[Event]]:
    """Groups of events, on all ranks, that are one exchange each.

    An exchange that began before the trace is left out: on some ranks it may
    have ended before.
    """
    calls: dict[str, list[Event]] = collections.defaultdict(list)
    ranks = {event.rank for event in events}
    for event in events:
        if event.kind == EXCHANGE:
            calls[event.more["call"]].append(event)
    return [group for group in calls.values() if len(group) == len(ranks)]


def _lateness(events: Sequence[Event], steps: int) -> dict[int, float]:
    """Microseconds per step that all others wait for a rank.

    While exchanges overlap, the time counts once.
    """
    spans: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
    ranks = {event.rank for event in events}
    for group in _grouped(events):
        ordered = sorted(group, key=lambda event: event.start)
        if len(ordered) > 1:
            # The last but one has begun, and only waits for the last.
            span = (ordered[-2].start, ordered[-1].start)
            spans[ordered[-1].rank].append(span)
    return {rank: _covered(spans.get(rank, ())) / steps for rank in ranks}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `tfdist-report`.

    Args:
        arguments: the command line without the program's name; `sys.argv` by
            default.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="tfdist-report", description="Reports on a finished run."
    )
    kinds = parser.add_subparsers(dest="what", required=True)
    of_trace = kinds.add_parser(
        "trace", help="what bounds the steps of a trace of callbacks.Timeline"
    )
    of_trace.add_argument("file")
    options = parser.parse_args(arguments)
    try:
        print(report(read(options.file)))
    except (OSError, ValueError, KeyError) as error:
        print(f"tfdist-report: {error}", file=sys.stderr)
        return 1
    return 0
