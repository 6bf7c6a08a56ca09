# SPDX-License-Identifier: Apache-2.0
"""Draws the rows of a report as bars."""

import pathlib

from matplotlib import axes
from matplotlib import figure

from benchmarks import report
from benchmarks import summary

_STOCK_COLOUR = "#8c8c8c"
_OUR_COLOUR = "#1f77b4"
_BEHIND_COLOUR = "#d95f0e"
_LEGEND = "grey: others; blue: ours; orange: ours where another is ahead"

# (title, attribute of a row, scale, the figure of `summary.behind`)
_PANELS = (
    ("steps per second", "steps_per_second", 1.0, "milliseconds"),
    ("MB sent per rank and step", "egress", report.MEGABYTE, "egress"),
    ("peak memory per rank, MB", "peak_rss", report.MEGABYTE, "peak_rss"),
)

# More groups than this are drawn in two columns.
_ONE_COLUMN = 4


def draw(path: pathlib.Path, groups: list[report.Group]) -> None:
    """Writes a PNG: per group one panel per figure; failures are named."""
    columns = 1 if len(groups) <= _ONE_COLUMN else 2
    lines = [groups[i : i + columns] for i in range(0, len(groups), columns)]
    heights = [1.4 + 0.4 * max(len(g.rows) for g in line) for line in lines]
    size = (12 * columns, sum(heights))
    sheet = figure.Figure(figsize=size, layout="constrained")
    sheet.supxlabel(_LEGEND, fontsize="medium")
    parts = sheet.subfigures(
        len(lines), columns, squeeze=False, height_ratios=heights
    )
    for index, group in enumerate(groups):
        _draw_group(parts[index // columns, index % columns], group)
    sheet.savefig(path, dpi=120 if columns == 1 else 80)


def _draw_group(part: figure.SubFigure, group: report.Group) -> None:
    part.suptitle(group.title)
    panels = part.subplots(1, len(_PANELS), sharey=True)
    for panel, (name, attribute, scale, lag) in zip(
        panels, _PANELS, strict=True
    ):
        values = [getattr(row, attribute) / scale for row in group.rows]
        colours = [
            _BEHIND_COLOUR
            if lag in summary.behind(row, group.rows)
            else (_OUR_COLOUR if row.ours else _STOCK_COLOUR)
            for row in group.rows
        ]
        _draw_panel(panel, values, colours, group.rows)
        panel.set_title(name, fontsize="small")


def _draw_panel(
    panel: axes.Axes,
    values: list[float],
    colours: list[str],
    rows: list[report.Row],
) -> None:
    bars = panel.barh([row.variant for row in rows], values, color=colours)
    labels = [
        _label(value) if row.status == "ok" else row.status
        for value, row in zip(values, rows, strict=True)
    ]
    panel.bar_label(bars, labels, padding=3)
    # Stock and ours differ by orders of magnitude in bytes.
    if max(values) > 20 * min((v for v in values if v), default=1.0):
        panel.set_xscale("log")
    panel.margins(x=0.3)
    if not panel.yaxis_inverted():
        panel.invert_yaxis()


def draw_scaling(
    path: pathlib.Path,
    title: str,
    rows: report.Rows,
    limits: dict[int, float],
) -> None:
    """Writes a PNG: figures against ranks, one line per variant.

    Args:
        path: of the PNG.
        title: of the chart.
        rows: what was measured; failed variants leave a gap.
        limits: number of ranks -> most bytes of memory, drawn if any.
    """
    sheet = figure.Figure(figsize=(13, 4.2), layout="constrained")
    sheet.suptitle(title)
    panels = sheet.subplots(1, len(_PANELS))
    ticks = sorted({ranks for _, ranks in rows})
    for panel, (name, attribute, scale, _) in zip(panels, _PANELS, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for (variant, ranks), row in report.by_variant(rows):
            value = getattr(row, attribute) / scale
            if row.status == "ok":
                lines.setdefault(variant, []).append((ranks, value))
        for variant, points in lines.items():
            panel.plot(*zip(*points, strict=True), "o-", label=variant)
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [str(ranks) for ranks in ticks])
        panel.set_xlabel("ranks")
        panel.set_ylim(bottom=0)
        panel.set_title(name, fontsize="medium")
    if limits:
        most = [value / report.MEGABYTE for value in limits.values()]
        panels[-1].plot(list(limits), most, "k--", label="limit")
    panels[-1].legend()
    sheet.savefig(path, dpi=120)


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
