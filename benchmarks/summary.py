# SPDX-License-Identifier: Apache-2.0
"""One table of all workloads, and where ours is not ahead."""

import operator

from benchmarks import report

# Memory of TensorFlow alone varies by that much from start to start.
_MEMORY_SLACK = 1.05

# Figure of a row -> (word in the table, how many times the best other's is a
# lag).
_FIGURES = {
    "milliseconds": ("time", 1.0),
    "egress": ("bytes", 1.0),
    "peak_rss": ("memory", _MEMORY_SLACK),
}
_COLUMNS = (
    "variant", "ms/step", "steps/s", "MB/step/rank", "x stock", "RSS MB",
)  # fmt: skip


def table(groups: list[report.Group]) -> str:
    """Formats all groups; "<-" marks where another is ahead of ours."""
    lines = [_line(_COLUMNS)]
    for group in groups:
        lines.append(f"\n{group.title}")
        lines += [_row(row, group) for row in group.rows]
    return "\n".join(lines)


def read(text: str) -> list[report.Group]:
    """Reads the groups of a `table`: the inverse, but for its rounding.

    Args:
        text: what `table` returned.

    Returns:
        Groups whose rows have the figures of the table; all others are 0.
    """
    groups: list[report.Group] = []
    for line in text.splitlines()[1:]:
        if line.startswith("  "):
            groups[-1].rows.append(_read_row(line, groups[-1].ranks))
        elif line:
            groups.append(report.Group(line, []))
    return groups


def behind(row: report.Row, rows: list[report.Row]) -> dict[str, str]:
    """Says of one of our rows in which figures another is ahead: figure -> who.

    What failed in a group is no rival, and bytes count only where there are
    several ranks.
    """
    rivals = [r for r in rows if r.status == "ok" and not r.ours]
    if not (row.ours and row.status == "ok" and rivals):
        return {}
    lags = {}
    for figure, (_, slack) in _FIGURES.items():
        best = min(rivals, key=operator.attrgetter(figure))
        least = getattr(best, figure)
        if least and getattr(row, figure) >= slack * least:
            lags[figure] = best.variant
    return lags


def planned(group: report.Group) -> str:
    """Says how much more than the best placement the planner's sends."""
    sent = {row.variant: row.egress for row in group.rows if row.status == "ok"}
    if "hybrid-auto" not in sent:
        return f"{group.title}: no plan was measured"
    best = min(sent, key=sent.__getitem__)
    ratio = sent["hybrid-auto"] / sent[best]
    return f"{group.title}: the plan sends {ratio:.3f} times {best}'s bytes"


def _row(row: report.Row, group: report.Group) -> str:
    if row.status != "ok":
        return f"  {row.variant:<16}  {row.status}: {row.reason}"
    stock = [
        other.milliseconds
        for other in group.rows
        if other.status == "ok" and not other.ours and other.variant != "fbgemm"
    ]
    faster = f"{min(stock) / row.milliseconds:.2f}" if stock else "-"
    cells = (
        row.variant,
        f"{row.milliseconds:.2f}",
        f"{row.steps_per_second:.2f}",
        f"{row.egress / report.MEGABYTE:.3f}" if row.egress else "-",
        faster,
        f"{row.peak_rss / report.MEGABYTE:.0f}",
    )
    lags = [
        f"{_FIGURES[figure][0]} ({rival})"
        for figure, rival in behind(row, group.rows).items()
    ]
    note = f"  <- behind: {', '.join(lags)}" if lags else ""
    wrong = row.reason if "differs" in row.reason else ""
    return _line(cells) + note + (f"  {wrong}" if wrong else "")


def _read_row(line: str, ranks: int) -> report.Row:
    variant, *cells = line.partition("<-")[0].split()
    if cells[0].endswith(":"):
        return report.Row(variant, cells[0][:-1], " ".join(cells[1:]))
    milliseconds, per_second = map(float, cells[:2])
    if per_second > milliseconds:  # It has more digits.
        milliseconds = 1e3 / per_second
    return report.Row(
        variant,
        "ok",
        " ".join(cells[5:]),
        milliseconds=milliseconds,
        egress=0.0 if cells[2] == "-" else float(cells[2]) * report.MEGABYTE,
        peak_rss=float(cells[4]) * report.MEGABYTE,
        ranks=ranks,
    )


def _line(cells: tuple[str, ...]) -> str:
    first, *others = cells
    return f"  {first:<16}" + "".join(f"{cell:>13}" for cell in others)
