# SPDX-License-Identifier: Apache-2.0
"""What bounds the steps of a trace: a rank, the links, or one kind of work."""

from __future__ import annotations

import bisect
import collections
import statistics
from collections.abc import Iterable
from collections.abc import Sequence

from tfdist_ext.tracing.trace import CALLBACK
from tfdist_ext.tracing.trace import EXCHANGE
from tfdist_ext.tracing.trace import KERNEL
from tfdist_ext.tracing.trace import STEP
from tfdist_ext.tracing.trace import Event

# By how names of ops begin; what is in none of these is "other work".
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
CALLBACKS = "callbacks"
_COLUMNS = (INPUT, "lookup", "update", OTHER, CALLBACKS, LINK, WAITING)
# Ops that wait for the input.
_READS = ("IteratorGetNext", "MultiDeviceIterator", "OneShotIterator")
_EXCHANGES = ("Tfdist>All", "Tfdist>Broadcast", "Tfdist>Barrier")


def report(events: Sequence[Event]) -> str:
    """A table of where the time of a step goes, and what bounds it.

    Args:
        events: of all ranks.

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
    """The sentence at the end."""
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
            f"Bound by rank {slowest}, for which the others wait "
            f"{late[slowest] / 1e3:.2f} ms of {step / 1e3:.2f}; it spends most "
            f"more than they in: {why}."
        )
    return (
        f"Bound by {most}: {work[most] / 1e3:.2f} ms of {step / 1e3:.2f} per "
        "step; no rank is late."
    )


def _spent(events: Sequence[Event], rank: int, steps: int) -> dict[str, float]:
    """Microseconds per step of a rank, by what; parallel work counts once."""
    spans: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for event in events:
        if event.rank != rank or event.kind == STEP:
            continue
        if event.kind == KERNEL:
            if not event.name.startswith((*_EXCHANGES, *_READS)):
                spans[_work_of(event.name)].append((event.start, event.end))
            continue
        if event.kind == CALLBACK:
            spans[CALLBACKS].append((event.start, event.end))
            continue
        waited = event.more.get("waited_us", 0.0)
        spans[LINK].append((event.start + waited, event.end))
        spans[WAITING].append((event.start, event.start + waited))
    spans[INPUT] = _before_work([e for e in events if e.rank == rank])
    return {name: _covered(spans.get(name, ())) / steps for name in _COLUMNS}


def _before_work(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Spans from the starts of a rank's steps to their first op or exchange.

    Without the callbacks that a step begins and ends with.
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
    """How long at least one of some spans lasts."""
    total = end = 0.0
    for first, last in sorted(spans):
        total += max(last - max(first, end), 0.0)
        end = max(end, last)
    return total


def waits(events: Sequence[Event]) -> dict[int, tuple[float, int]]:
    """Microseconds that each exchange of a rank began before the last's.

    Returns:
        By the identity of the event, with the rank that came last.
    """
    found = {}
    for group in _together(events):
        last = max(group, key=lambda event: event.start)
        for event in group:
            waited = min(last.start, event.end) - event.start
            found[id(event)] = max(waited, 0.0), last.rank
    return found


def _together(events: Sequence[Event]) -> list[list[Event]]:
    """The exchanges that are one, of all ranks.

    One that has begun before the trace is left out: it may have ended before
    on some of the ranks.
    """
    calls: dict[str, list[Event]] = collections.defaultdict(list)
    ranks = {event.rank for event in events}
    for event in events:
        if event.kind == EXCHANGE:
            calls[event.more["call"]].append(event)
    return [group for group in calls.values() if len(group) == len(ranks)]


def _lateness(events: Sequence[Event], steps: int) -> dict[int, float]:
    """Microseconds per step that all others wait for a rank.

    Of exchanges that overlap the longest counts.
    """
    spans: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
    ranks = {event.rank for event in events}
    for group in _together(events):
        ordered = sorted(group, key=lambda event: event.start)
        if len(ordered) > 1:
            # The last but one has begun, and waits for the last alone.
            span = (ordered[-2].start, ordered[-1].start)
            spans[ordered[-1].rank].append(span)
    return {rank: _covered(spans.get(rank, ())) / steps for rank in ranks}
