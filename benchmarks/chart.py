# SPDX-License-Identifier: Apache-2.0
"""Draws the rows of a report as bars.

As a program it draws the charts of docs/benchmarks.md from a table.txt of
`benchmarks.all`: one per workload, and headline.svg.
"""

import argparse
import pathlib

import matplotlib as mpl
from matplotlib import axes
from matplotlib import colors
from matplotlib import figure
from matplotlib import patches

from benchmarks import report
from benchmarks import summary

_OTHERS = ("others", "#8c8c8c")
_OURS = ("tfdist_ext", "#1f77b4")
_BEHIND = ("tfdist_ext, where another is ahead", "#d95f0e")

# (title, attribute of a row, scale, the figure of `summary.behind`)
_PANELS = (
    ("steps per second", "steps_per_second", 1.0, "milliseconds"),
    ("MB sent per rank and step", "egress", report.MEGABYTE, "egress"),
    ("peak memory per rank, MB", "peak_rss", report.MEGABYTE, "peak_rss"),
)
_Panel = tuple[str, str, float, str]

# Inches. A page shows a chart as wide as it is, a phone at half of that.
_WIDTH = 6.4
_BAR = 0.24
_TITLE = 0.6

# Workloads of the headline: their names there.
_HEADLINE = {
    "timelines": "timelines, 23M weights",
    "ads": "ads, 478M weights",
}
# Systems of the headline: the first of these variants that ran.
_SYSTEMS = {
    "stock": ("stock-sparse", "stock-dense"),
    "parameter\nserver": ("parameter-server",),
    "FBGEMM": ("fbgemm",),
    "tfdist_ext": ("hybrid-auto", "hybrid-row"),
}


def measured(groups: list[report.Group]) -> list[tuple[report.Group, _Panel]]:
    """Returns the panels for which there is a figure, group by group."""
    return [
        (group, panel)
        for group in groups
        for panel in _PANELS
        if any(getattr(row, panel[1]) for row in group.rows)
    ]


def draw(path: pathlib.Path, groups: list[report.Group]) -> None:
    """Writes a chart: the figures of each group that were measured.

    Args:
        path: of the chart, PNG or SVG; none if nothing was measured.
        groups: rows that can be compared; failures are named.
    """
    parts = measured(groups)
    if not parts:
        return
    heights = [_TITLE + _BAR * len(group.rows) for group, _ in parts]
    sheet = _sheet(sum(heights) + 0.4)
    places = sheet.subplots(len(parts), 1, squeeze=False, height_ratios=heights)
    titled = None
    for place, (group, panel) in zip(places.flat, parts, strict=True):
        names = [row.variant for row in group.rows]
        _draw_panel(place, names, group.rows, group.rows, panel)
        title = "" if group is titled else f"{group.title}\n"
        place.set_title(title + panel[0], loc="left", fontsize=10)
        titled = group
    _save(sheet, path)


def draw_workloads(folder: pathlib.Path, groups: list[report.Group]) -> None:
    """Writes one chart per workload, and that of the headline.

    Args:
        folder: where NAME.svg and headline.svg are written.
        groups: of all workloads.
    """
    for name in dict.fromkeys(group.workload for group in groups):
        chosen = [group for group in groups if group.workload == name]
        draw(folder / f"{name}.svg", chosen)
    draw_headline(folder / "headline.svg", groups)


def draw_headline(path: pathlib.Path, groups: list[report.Group]) -> None:
    """Writes speed and bytes of all systems on the largest workloads.

    Args:
        path: of the chart; it is not written if there is no such workload.
        groups: of all workloads.
    """
    largest = [group for group in groups if group.workload in _HEADLINE]
    speed, sent = _PANELS[:2]
    several = [(g, p) for g in largest if g.ranks > 1 for p in (speed, sent)]
    alone = [(g, speed) for g in largest if g.ranks == 1]
    parts = several + alone
    if not parts:
        return
    chosen = [_systems(group) for group, _ in parts]
    lines = [chosen[at : at + 2] for at in range(0, len(parts), 2)]
    heights = [1.0 + 0.4 * max(map(len, line)) for line in lines]
    sheet = _sheet(sum(heights) + 0.4)
    places = sheet.subplots(
        len(lines), 2, squeeze=False, height_ratios=heights
    ).flat
    for place, rows, (group, panel) in zip(places, chosen, parts, strict=False):
        _draw_panel(place, list(rows), list(rows.values()), group.rows, panel)
        ranks = "1 process" if group.ranks == 1 else f"{group.ranks} ranks"
        place.set_title(
            f"{_HEADLINE[group.workload]}, {ranks}\n{panel[0]}",
            loc="left",
            fontsize=9,
        )
    for place in list(places)[len(parts) :]:
        place.set_axis_off()
    _save(sheet, path)


def _systems(group: report.Group) -> dict[str, report.Row]:
    """The row of every system that was measured, by its name."""
    rows = {row.variant: row for row in group.rows}
    found = {}
    for system, variants in _SYSTEMS.items():
        tried = [rows[name] for name in variants if name in rows]
        if tried:
            ran = [row for row in tried if row.status == "ok"]
            found[system] = (ran or tried)[0]
    return found


def _draw_panel(
    place: axes.Axes,
    names: list[str],
    rows: list[report.Row],
    rivals: list[report.Row],
    panel: _Panel,
) -> None:
    """Draws one figure of `rows`, which are among `rivals`."""
    _, attribute, scale, lag = panel
    values = [getattr(row, attribute) / scale for row in rows]
    colours = [
        _BEHIND[1]
        if lag in summary.behind(row, rivals)
        else (_OURS if row.ours else _OTHERS)[1]
        for row in rows
    ]
    bars = place.barh(names, values, color=colours)
    labels = [
        _label(value) if row.status == "ok" else row.status
        for value, row in zip(values, rows, strict=True)
    ]
    place.bar_label(bars, labels, padding=3)
    place.set_xlim(0, 1.25 * max(values) or 1.0)
    place.set_xticks([])  # The bars are labelled.
    place.spines[["top", "right", "bottom"]].set_visible(False)
    place.tick_params(axis="y", length=0)
    place.invert_yaxis()


def _sheet(height: float) -> figure.Figure:
    return figure.Figure(figsize=(_WIDTH, height), layout="constrained")


def _save(sheet: figure.Figure, path: pathlib.Path) -> None:
    """Explains the colours. The same chart is the same SVG."""
    drawn = {
        colors.to_hex(bar.get_facecolor())
        for place in sheet.axes
        for bar in place.patches
    }
    legend = [
        patches.Patch(color=colour, label=name)
        for name, colour in (_OTHERS, _OURS, _BEHIND)
        if colour in drawn
    ]
    sheet.legend(handles=legend, loc="outside lower center", ncols=3)
    _write(sheet, path)


def _write(sheet: figure.Figure, path: pathlib.Path) -> None:
    is_svg = path.suffix == ".svg"
    # Text as text: a file of half the size, that can be searched.
    rc = {"svg.hashsalt": path.name, "svg.fonttype": "none"}
    with mpl.rc_context(rc):
        sheet.savefig(path, dpi=120, metadata={"Date": None} if is_svg else {})


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


def draw_speedups(
    path: pathlib.Path, title: str, factors: dict[str, dict[int, float]]
) -> None:
    """Writes a chart: factors against ranks, one line per variant.

    Args:
        path: of the chart.
        title: of the chart.
        factors: variant -> ranks -> how many times as fast as the others.
    """
    sheet = _sheet(3.4)
    place = sheet.subplots()
    for name, points in factors.items():
        place.plot(points.keys(), points.values(), "o-", label=name)
    ticks = sorted({ranks for points in factors.values() for ranks in points})
    place.set_xticks(ticks)
    place.set_xlabel("ranks")
    place.set_ylim(bottom=0)
    place.spines[["top", "right"]].set_visible(False)
    place.set_title(
        f"{title}\nsteps per second, times those of stock", fontsize=9
    )
    place.legend(frameon=False)
    _write(sheet, path)


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chart", description=__doc__
    )
    parser.add_argument("table", type=pathlib.Path, help="a table.txt")
    return parser


def main() -> None:
    """Draws the charts beside the table."""
    path = make_parser().parse_args().table
    draw_workloads(path.parent, summary.read(path.read_text()))


if __name__ == "__main__":
    main()
