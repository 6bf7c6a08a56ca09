# SPDX-License-Identifier: Apache-2.0
"""What a check says."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from tfdist_ext.checking.causes import Finding
from tfdist_ext.checking.causes import ratio_of
from tfdist_ext.checking.comparing import Compared

_LOG = logging.getLogger("tfdist_ext")
_MOST_LINES = 20


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The result of `HybridParallelStrategy.check_step`.

    Attributes:
        ok: whether the ranks compute what one process computes. True where
            nothing could be compared.
        lines: that were printed by rank 0.
        compared: how many numbers and arrays were compared, by kind.
    """

    ok: bool
    lines: tuple[str, ...]
    compared: dict[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(self.lines)


def report_of(
    what: str,
    world_size: int,
    compared: Sequence[Compared],
    found: Sequence[Finding],
) -> CheckReport:
    """Says what was found.

    Args:
        what: was checked.
        world_size: number of ranks.
        compared: all that was.
        found: what differs.
    """
    counts = {
        kind: len({each.name for each in compared if each.kind == kind})
        for kind in ("log", "gradient", "metric", "state")
    }
    if found:
        lines = _table(what, world_size, found)
        return CheckReport(False, tuple(lines), counts)
    line = (
        f"checked: {what} on {world_size} ranks equals one process: "
        f"{_closeness(compared)}, {_count(counts['gradient'], 'variable')}, "
        f"{_count(counts['metric'], 'metric state')}"
    )
    if counts["state"]:
        line += f", {_count(counts['state'], 'other state')}"
    return CheckReport(True, (line,), counts)


def show(report: CheckReport, rank: int) -> None:
    """Lets rank 0 say it.

    Args:
        report: the same on all ranks.
        rank: this one.
    """
    if rank == 0:
        level = logging.INFO if report.ok else logging.WARNING
        _LOG.log(level, "%s", report)


def _closeness(compared: Sequence[Compared]) -> str:
    logs = [each for each in compared if each.kind == "log"]
    loss = [each for each in logs if each.name == "loss"] or logs
    kind = "loss" if loss else "gradients"
    chosen = loss or [each for each in compared if each.kind == "gradient"]
    apart = [each.apart / (each.whole or 1.0) for each in chosen]
    return f"{kind} {max(apart, default=0.0):.0e}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _table(what: str, world_size: int, found: Sequence[Finding]) -> list[str]:
    head = ("", "name", "one process", f"{world_size} ranks", "ratio", "cause")
    rows = [head, *map(_row, found[:_MOST_LINES])]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        f"checked: {what} on {world_size} ranks is not what one process "
        "computes (norms):"
    ]
    for row in rows:
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row[-1]]).rstrip())
    if len(found) > _MOST_LINES:
        lines.append(f"  and {len(found) - _MOST_LINES} more")
    remedies = dict.fromkeys((each.cause, each.remedy) for each in found)
    lines += [f"Remedy ({cause}): {remedy}." for cause, remedy in remedies]
    return lines


def _row(finding: Finding) -> tuple[str, ...]:
    each = finding.compared
    return (
        each.kind,
        each.name,
        f"{each.whole:.6g}",
        f"{each.ranks:.6g}",
        f"{ratio_of(each):.3f}",
        finding.cause,
    )
