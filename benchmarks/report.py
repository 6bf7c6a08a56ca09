# SPDX-License-Identifier: Apache-2.0
"""Turns the outcomes of variants into a table, targets, JSON and a chart."""

import dataclasses
import json
import math
import pathlib
from typing import Any

from benchmarks import launch

MEGABYTE = 1e6


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant's figures; of several ranks always the worst one.

    All figures are 0 unless `status` is "ok". An `asynchronous` variant has
    no error: its results depend on the order in which updates arrive.
    """

    variant: str
    status: str
    reason: str = ""
    milliseconds: float = 0.0
    p99: float = 0.0
    egress: float = 0.0
    ingress: float = 0.0
    cpu_milliseconds: float = 0.0
    peak_rss: float = 0.0
    error: float = 0.0
    steps: int = 0
    asynchronous: bool = False
    ranks: int = 0

    @property
    def steps_per_second(self) -> float:
        """Reciprocal of the median step."""
        return 1e3 / self.milliseconds if self.milliseconds else 0.0

    @property
    def ours(self) -> bool:
        """Whether the variant is this project's."""
        return self.variant.startswith("hybrid")


# (variant, ranks) -> its row.
Rows = dict[tuple[str, int], Row]


def by_variant(rows: Rows) -> list[tuple[tuple[str, int], Row]]:
    """Items of `rows`, one variant after the other."""
    order = list(dict.fromkeys(name for name, _ in rows))
    return sorted(rows.items(), key=lambda item: order.index(item[0][0]))


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that can be compared: one workload on as many ranks."""

    title: str
    rows: list[Row]

    @property
    def workload(self) -> str:
        """Its name, with which the title begins."""
        return self.title.partition(",")[0]

    @property
    def ranks(self) -> int:
        """How many ran, as the title says."""
        return int(self.title.split(", ")[1].split()[0])


@dataclasses.dataclass(frozen=True)
class Target:
    """A limit one figure of one variant is held against."""

    variant: str
    figure: str
    limit: float
    at_least: bool
    unit: str
    scale: float = 1.0

    def verdict(self, row: Row) -> str:
        """Returns a line that says whether `row` reaches the target."""
        value = getattr(row, self.figure) / self.scale
        reached = row.status == "ok" and (
            value >= self.limit if self.at_least else value <= self.limit
        )
        sign = ">=" if self.at_least else "<="
        measured = f"{value:.4g}" if row.status == "ok" else row.status
        return (
            f"{'reached' if reached else 'NOT REACHED':<12}"
            f"{self.variant}: {self.figure} {sign} {self.limit:g} {self.unit}"
            f" (measured: {measured})"
        )


def _speed(variant: str) -> Target:
    return Target(variant, "steps_per_second", 20, True, "steps/s")


def _bytes(variant: str, limit: float) -> Target:
    return Target(variant, "egress", limit, False, "MB", MEGABYTE)


def _memory(variant: str) -> Target:
    return Target(variant, "peak_rss", 10, False, "GB", 1e9)


# (workload, ranks) -> what is asked at 150 MB/s, 256 samples per rank, fp32.
TARGETS = {
    ("timelines", 4): (
        _speed("hybrid-row"),
        _speed("hybrid-column"),
        _bytes("hybrid-row", 1.3),
        _bytes("hybrid-column", 0.75),
    ),
    ("ads", 2): (
        _speed("hybrid-row"),
        _speed("hybrid-column"),
        _memory("hybrid-row"),
        _memory("hybrid-column"),
    ),
}


def make_row(
    variant: str, outcome: launch.Outcome, dilation: float = 1.0
) -> Row:
    """Condenses the ranks' results; of each figure the worst rank's.

    Args:
        variant: name of the variant.
        outcome: results of its ranks.
        dilation: factor by which steps have taken longer than they would on
            a core for each rank. Processor time is not divided.
    """
    if outcome.status != "ok":
        return Row(variant, outcome.status, outcome.reason)
    results = outcome.results

    def worst(group: str, key: str) -> float:
        return max(result[group][key] for result in results)

    return Row(
        variant,
        "ok",
        max(result["problem"] for result in results)
        or results[0].get("note", ""),
        milliseconds=worst("step_ms", "p50") / dilation,
        p99=worst("step_ms", "p99") / dilation,
        egress=worst("per_step", "egress_bytes"),
        ingress=worst("per_step", "ingress_bytes"),
        cpu_milliseconds=worst("per_step", "cpu_ms"),
        peak_rss=max(result["peak_rss_bytes"] for result in results),
        error=max(
            max(result["errors"].values(), default=math.nan)
            for result in results
        ),
        steps=results[0]["steps"],
        asynchronous=results[0].get("asynchronous", False),
        ranks=len(results),
    )


def baseline(rows: list[Row]) -> Row | None:
    """The first stock variant that ran; others are compared with it."""
    for row in rows:
        if row.variant.startswith("stock") and row.status == "ok":
            return row
    return None


_COLUMNS = (
    "variant", "ms/step", "p99", "steps/s", "x stock", "egress MB",
    "ingress MB", "x less", "cpu ms", "RSS MB", "error",
)  # fmt: skip


def table(rows: list[Row], counted: bool) -> str:
    """Formats the rows; bytes are "-" unless they were `counted`."""
    stock = baseline(rows)
    lines = [_line(_COLUMNS), _line(tuple("-" * 9 for _ in _COLUMNS))]
    for row in rows:
        if row.status == "ok":
            lines.append(_line(_cells(row, stock, counted)))
            if row.reason:
                lines.append(f"{'':<16}  {row.reason}")
        else:
            lines.append(f"{row.variant:<16}  {row.status}: {row.reason}")
    return "\n".join(lines)


def _line(cells: tuple[str, ...]) -> str:
    first, *others = cells
    return f"{first:<16}" + "".join(f"{cell:>11}" for cell in others)


def _cells(row: Row, stock: Row | None, counted: bool) -> tuple[str, ...]:
    faster = less = egress = ingress = "-"
    if counted:
        egress = f"{row.egress / MEGABYTE:.3f}"
        ingress = f"{row.ingress / MEGABYTE:.3f}"
    if stock and stock.ranks == row.ranks:
        faster = f"{stock.milliseconds / row.milliseconds:.2f}"
        if counted and row.egress:
            less = f"{stock.egress / row.egress:.1f}"
    return (
        row.variant,
        f"{row.milliseconds:.2f}",
        f"{row.p99:.2f}",
        f"{row.steps_per_second:.2f}",
        faster,
        egress,
        ingress,
        less,
        f"{row.cpu_milliseconds:.2f}",
        f"{row.peak_rss / MEGABYTE:.0f}",
        "  asynchronous" if row.asynchronous else f"{row.error:.1e}",
    )


def verdicts(rows: list[Row], settings: dict[str, Any]) -> list[str]:
    """Says of every target whether it is reached; [] where none applies."""
    if settings.get("dilation", 1.0) != 1.0:
        return []
    asked = {"egress": "150mbps", "batch": 256, "wire_dtype": "float32"}
    if any(settings[name] != value for name, value in asked.items()):
        return []
    targets = TARGETS.get((settings["workload"], settings["ranks"]), ())
    return [
        target.verdict(row)
        for target in targets
        for row in rows
        if row.variant == target.variant
    ]


def write_json(
    path: pathlib.Path,
    settings: dict[str, Any],
    machine: dict[str, Any],
    outcomes: dict[str, launch.Outcome],
) -> None:
    """Writes everything that was measured, per variant and rank."""
    content = {
        "settings": settings,
        "machine": machine,
        "variants": {
            name: dataclasses.asdict(outcome)
            for name, outcome in outcomes.items()
        },
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
