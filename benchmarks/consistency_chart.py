# SPDX-License-Identifier: Apache-2.0
"""Draws what `benchmarks.consistency` has measured, a chart per setting.

    python -m benchmarks.consistency_chart docs/charts RESULT.json ...

Writes FOLDER/consistency_SETTING.svg; settings whose names begin with `link`
share a chart, and so do settings with several seeds, whose chart has the
differences to BSP. Runs of several files are put together.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import matplotlib as mpl
from matplotlib import axes
from matplotlib import figure

from benchmarks import consistency

_BASE, _OTHER = "#8c8c8c", "#1f77b4"
_WIDTH, _BAR, _HEAD = 6.4, 0.22, 0.65  # inches
_TITLES = {
    "equal": "equal ranks, fast links",
    "slow": "the last rank is 3 times slower",
    "pauses": "each rank pauses for 2 s after one of 10 steps, at random",
    "link150": "links of 150 MB/s",
    "link15": "links of 15 MB/s",
    "link5": "links of 5 MB/s",
    "quality": "planted data",
    "clicks": "clicks of ml-100k",
}
_Records = list[dict[str, Any]]


def figures_of(records: _Records) -> dict[str, dict[str, float]]:
    """The figures of a setting: title of the panel -> mode -> figure.

    Args:
        records: runs of one setting and number of ranks, one for each mode.
    """
    fine = [record for record in records if record["status"] == "ok"]
    goal = min(record["ranks"][0]["curve"][-1][1] for record in fine)
    panels: dict[str, dict[str, float]] = {}
    for record in fine:
        mode, ranks = record["mode"], record["ranks"]
        rate = min(
            consistency.last_rate(each["curve"], record["steps"])
            for each in ranks
        )
        seconds = consistency.seconds_to(ranks[0]["curve"], goal)
        sent = max(each["bytes_per_step"] for each in ranks)
        found = {
            "samples per second": rate * record["batch"],
            f"seconds to AUC {goal:.3f}": seconds,
        }
        if sent:
            found["kB sent per rank and step"] = sent / 1e3
        for title, value in found.items():
            panels.setdefault(title, {})[mode] = value
    return panels


def draw_rates(path: pathlib.Path, settings: dict[str, _Records]) -> None:
    """Writes a chart of timed settings, one below the other."""
    parts = {name: figures_of(records) for name, records in settings.items()}
    columns = max(len(panels) for panels in parts.values())
    bars = [len(next(iter(panels.values()))) for panels in parts.values()]
    heights = [_HEAD + _BAR * count for count in bars]
    sheet = figure.Figure((_WIDTH, sum(heights)), layout="constrained")
    places = sheet.subplots(
        len(parts), columns, squeeze=False, height_ratios=heights
    )
    for line, (name, panels) in zip(places, parts.items(), strict=True):
        for column, place in enumerate(line):
            if column >= len(panels):
                place.set_axis_off()
                continue
            title, values = list(panels.items())[column]
            _draw_bars(place, values, names=column == 0)
            above = f"{_TITLES[name]}\n" if column == 0 else ""
            place.set_title(above + title, loc="left", fontsize=9)
    _save(sheet, path)


def _draw_bars(
    place: axes.Axes, values: dict[str, float], *, names: bool
) -> None:
    base = next(iter(values))
    colours = [_BASE if mode == base else _OTHER for mode in values]
    bars = place.barh(list(values), list(values.values()), color=colours)
    labels = [f"{value:.0f}" for value in values.values()]
    place.bar_label(bars, labels, padding=2, fontsize=8)
    place.set_xlim(0, 1.3 * max(values.values()))
    place.set_xticks([])
    place.invert_yaxis()
    place.tick_params(axis="y", length=0, labelsize=8, labelleft=names)
    place.spines[["top", "right", "bottom"]].set_visible(False)


def draw_quality(
    path: pathlib.Path, groups: dict[tuple[str, int], _Records]
) -> None:
    """Writes a chart of the AUC: a point for each seed, and their mean.

    Args:
        path: of the chart.
        groups: runs, by setting and number of ranks.
    """
    names = list(dict.fromkeys(setting for setting, _ in groups))
    columns = max(sum(s == name for s, _ in groups) for name in names)
    found = {
        key: consistency.differences(records) for key, records in groups.items()
    }
    modes = max(len(each) for each in found.values())
    height = len(names) * (1.5 * _HEAD + _BAR * modes)
    sheet = figure.Figure((_WIDTH, height), layout="constrained")
    places = sheet.subplots(
        len(names), columns, squeeze=False, sharey=True, sharex="row"
    )
    for line, name in zip(places, names, strict=True):
        of_name = [key for key in found if key[0] == name]
        for place in line[len(of_name) :]:
            place.set_axis_off()
        for place, key in zip(line, of_name, strict=False):
            _draw_points(place, found[key])
            title = f"{_TITLES[name]}\n{key[1]} ranks"
            place.set_title(title, loc="left", fontsize=9)
    for place in places[-1]:
        place.set_xlabel("AUC, difference to BSP()", fontsize=8)
    places[0][0].invert_yaxis()
    _save(sheet, path)


def _draw_points(place: axes.Axes, found: dict[str, list[float]]) -> None:
    place.axvline(0, color=_BASE, linewidth=0.8)
    # Differences of any size are seen; up to 0.002 the axis is linear.
    place.set_xscale("symlog", linthresh=0.002)
    place.xaxis.set_major_formatter("{x:g}")
    for mode, values in found.items():
        if not values:
            continue
        mean = sum(values) / len(values)
        place.plot(values, [mode] * len(values), ".", color=_OTHER, alpha=0.5)
        place.plot([mean], [mode], "|", color="black", markersize=9)
    place.tick_params(labelsize=8)
    place.spines[["top", "right"]].set_visible(False)


def _save(sheet: figure.Figure, path: pathlib.Path) -> None:
    """The same chart is the same SVG; its text stays text."""
    rc = {"svg.hashsalt": path.name, "svg.fonttype": "none"}
    with mpl.rc_context(rc):
        sheet.savefig(path, metadata={"Date": None})


def draw(folder: pathlib.Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes all charts.

    Args:
        folder: where they are written.
        records: `runs` of results. Modes are drawn in the order of `MODES`.
    """
    order = list(consistency.MODES)
    records = sorted(records, key=lambda record: order.index(record["mode"]))
    timed: dict[str, dict[str, _Records]] = {}
    untimed: dict[tuple[str, int], _Records] = {}
    for record in records:
        name = record["setting"]
        if name in consistency.UNTIMED:
            key = name, len(record["ranks"])
            untimed.setdefault(key, []).append(record)
            continue
        chart = "links" if name.startswith("link") else name
        timed.setdefault(chart, {}).setdefault(name, []).append(record)
    for chart, settings in timed.items():
        draw_rates(folder / f"consistency_{chart}.svg", settings)
    if untimed:
        draw_quality(folder / "consistency_quality.svg", untimed)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path, help="of the charts")
    parser.add_argument("results", type=pathlib.Path, nargs="+")
    return parser


def main() -> None:
    """Reads the results and draws."""
    arguments = make_parser().parse_args()
    texts = [path.read_text() for path in arguments.results]
    runs = [run for text in texts for run in json.loads(text)["runs"]]
    draw(arguments.folder, runs)


if __name__ == "__main__":
    main()
