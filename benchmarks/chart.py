# SPDX-License-Identifier: Apache-2.0
"""Draws the rows of a report as bars."""

import pathlib

from matplotlib import axes
from matplotlib import figure

from benchmarks import report

_STOCK_COLOUR = "#8c8c8c"
_OUR_COLOUR = "#1f77b4"

# (title, attribute of a row, scale)
_PANELS = (
    ("steps per second", "steps_per_second", 1.0),
    ("MB sent per rank and step", "egress", report.MEGABYTE),
    ("peak memory per rank, MB", "peak_rss", report.MEGABYTE),
)


def draw(path: pathlib.Path, title: str, rows: list[report.Row]) -> None:
    """Writes a PNG with one panel per figure; failed variants are named."""
    sheet = figure.Figure(figsize=(12, 1.4 + 0.5 * len(rows)))
    sheet.suptitle(title)
    panels = sheet.subplots(1, len(_PANELS), sharey=True)
    for panel, (name, attribute, scale) in zip(panels, _PANELS, strict=True):
        values = [getattr(row, attribute) / scale for row in rows]
        _draw_panel(panel, name, values, rows)
    sheet.tight_layout()
    sheet.savefig(path, dpi=120)


def _draw_panel(
    panel: axes.Axes, name: str, values: list[float], rows: list[report.Row]
) -> None:
    colours = [
        _STOCK_COLOUR if row.variant.startswith("stock") else _OUR_COLOUR
        for row in rows
    ]
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
    panel.set_title(name)
    if not panel.yaxis_inverted():
        panel.invert_yaxis()


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
