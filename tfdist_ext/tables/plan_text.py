# SPDX-License-Identifier: Apache-2.0
"""A sharding plan as text, figures and a plot."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist_ext.tables import balance
from tfdist_ext.tables import load
from tfdist_ext.tables.checks import Storage
from tfdist_ext.tables.load import Load
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.problem import Problem
from tfdist_ext.tables.problem import Setting


@dataclasses.dataclass(frozen=True)
class Figures:
    """Loads of the tables of a problem with given placements.

    Attributes:
        problem: numbers of the tables, and of the machine.
        placements: placement of every table, by name, in the problem's order.
    """

    problem: Problem
    placements: Mapping[str, TablePlacement]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.problem.setting.world_size

    @functools.cached_property
    def options(self) -> balance.Options:
        """Costs of every table in every shape."""
        return balance.Options(self.problem, list(self.placements.values()))

    @functools.cached_property
    def loads(self) -> Mapping[str, Load]:
        """Load of the ranks by each table, by name, arrays `[W]`."""
        return {
            name: balance.load_of_table(self.options, index, placement)
            for index, (name, placement) in enumerate(self.placements.items())
        }

    @functools.cached_property
    def storages(self) -> Mapping[str, Storage]:
        """Storage of each table, by name.

        Raises:
            ValueError: the requested storage is not possible.
        """
        if not load.is_storage_decided(self.problem):  # needs no loads
            return dict.fromkeys(self.placements, "host")
        return load.decide_storage(self.problem, self.loads)

    @property
    def on_devices(self) -> Load:
        """Load of the ranks by the tables on GPUs, `[W]`."""
        chosen = [
            self.loads[name]
            for name, place in self.storages.items()
            if place == "device"
        ]
        return sum(chosen, start=Load())

    @functools.cached_property
    def total(self) -> Load:
        """Load of the ranks by all tables and the exchanges, `[W]`."""
        load = sum(self.loads.values(), start=Load())
        return balance.total(load, list(self.placements.values()), self.problem)

    @property
    def seconds_per_step(self) -> float:
        """Estimated seconds per step for the tables of the busiest rank."""
        return float(np.max(self.total.time(self.problem.setting)))


_KILO, _MEGA = 1e3, 1e6

_SUMMARISED = (
    "table",
    "rows x dim",
    "placement",
    "ranks",
    "MB",
    "kB ids",
    "kB results",
    "why",
)
_EXPLAINED = (
    "",
    "placement",
    "parts",
    "MB",
    "kB ids",
    "kB results",
    "ms mean",
    "ms busiest",
    "note",
)


def summary(figures: Figures) -> str:
    """One line per table, then the load of the busiest rank."""
    lines = [_SUMMARISED]
    for table in figures.problem.tables:
        placement = figures.placements[table.name]
        lines.append(
            (
                table.name,
                f"{table.rows} x {table.dim}",
                describe(placement) + _storage(figures, table.name),
                _ranks(placement, figures.world_size),
                *_figures(figures.loads[table.name]),
                _why(figures, table.name),
            )
        )
    setting = figures.problem.setting
    total = figures.total
    return "\n".join(
        [
            f"{figures.world_size} ranks, {setting.batch_size} samples each, "
            f"{setting.wire_bytes:g} bytes per number on the wire",
            *_aligned(lines),
            f"per step, the busiest rank sends {_kb(total.sent)} kB and "
            f"receives {_kb(total.received)} kB,",
            f"reads {_mb(total.lookups)} MB of rows and takes about "
            f"{1e3 * figures.seconds_per_step:.2f} ms; "
            f"the fullest holds {_mb(total.memory)} MB",
            *_on_devices(figures),
            *_assumptions(setting),
        ]
    )


def explain(figures: Figures, table: str) -> str:
    """Costs of each placement of a table alone, cheapest first."""
    options = figures.options
    index = figures.problem.index(table)
    numbers = figures.problem.tables[index]
    chosen = options.shape_index(figures.placements[table])
    setting = figures.problem.setting
    order = np.argsort(options.mean_time[index], kind="stable").tolist()
    lines = [_EXPLAINED]
    for shape in order:
        row_parts, column_parts, _ = options.triples[shape]
        cells = row_parts * column_parts
        if row_parts > numbers.rows or column_parts > numbers.dim:
            continue
        placement = options.first_ranks(shape)
        load = balance.load_of_table(options, index, placement)
        busiest = np.max(load.time(setting))
        lines.append(
            (
                "*" if shape == chosen else "",
                describe(placement),
                f"{row_parts} x {column_parts}" if cells else "-",
                *_figures(load),
                f"{1e3 * options.mean_time[index, shape]:.3f}",
                f"{1e3 * busiest:.3f}",
                "" if options.allowed[index, shape] else "not asked for",
            )
        )
    features = [
        f"{f.name} ({f.hotness:g} ids per sample, Zipf {f.exponent:.3g})"
        for f in figures.problem.features
        if f.table == index
    ]
    return "\n".join(
        [
            f"{table}: {numbers.rows} x {numbers.dim}, looked up by "
            f"{', '.join(features) or 'no feature'}",
            *_aligned(lines),
            f"* {describe(figures.placements[table])} on ranks "
            f"{_ranks(figures.placements[table], figures.world_size)}"
            f"{_storage(figures, table)}: {_why(figures, table)}.",
            "Bytes, memory and 'busiest' are of the rank with the most, as if "
            "the table were alone.",
            *_assumptions(setting),
        ]
    )


def _storage(figures: Figures, table: str) -> str:
    return ", on GPUs" if figures.storages[table] == "device" else ""


def _on_devices(figures: Figures) -> list[str]:
    """A line with the memory of the fullest GPU, if tables are on GPUs."""
    if "device" not in figures.storages.values():
        return []
    limit = figures.problem.setting.device_memory
    return [
        f"of tables, the fullest GPU holds {_mb(figures.on_devices.memory)} MB "
        f"and may hold {_mb(limit)}"
    ]


def _assumptions(setting: Setting) -> list[str]:
    if setting.batch_known:
        return []
    return [
        "Made before the batch was known: "
        f"{setting.batch_size} samples per rank are assumed."
    ]


def describe(placement: TablePlacement) -> str:
    """A short description of a placement."""
    kind: str = placement.kind
    if kind == "grid":
        kind = f"grid {placement.row_parts} x {placement.column_parts}"
    if placement.deduplicate:
        kind += ", deduplicated"
    return kind


def _why(figures: Figures, table: str) -> str:
    options = figures.options
    index = figures.problem.index(table)
    asked = figures.problem.tables[index].placement
    if isinstance(asked, TablePlacement):
        return "given"
    chosen = options.shape_index(figures.placements[table])
    times = np.where(options.allowed[index], options.score[index], np.inf)
    cheapest = int(times.argmin())
    forced = "" if asked in ("auto", "sparsecore") else "asked for; "
    if len(times[np.isfinite(times)]) == 1:
        return forced + "no other way"
    if times[chosen] <= times[cheapest]:
        times[chosen] = np.inf
        other = int(times.argmin())
        more = times[other] / max(options.score[index, chosen], 1e-12)
        return (
            f"{forced}cheapest, {_shape(options.triples[other])} "
            f"+{100 * (more - 1):.0f}%"
        )
    less = times[cheapest] / max(times[chosen], 1e-12)
    sent = options.mean_bytes[index]
    reason = "even load or memory"
    if sent[chosen] < sent[cheapest]:
        reason = "fewer bytes"
    return (
        f"{forced}{reason}, {_shape(options.triples[cheapest])} alone "
        f"{100 * (less - 1):.0f}%"
    )


def _shape(triple: tuple[int, int, bool]) -> str:
    row_parts, column_parts, deduplicate = triple
    if not row_parts:
        return "data_parallel"
    return f"{row_parts} x {column_parts}{' dedup.' if deduplicate else ''}"


def _ranks(placement: TablePlacement, world_size: int) -> str:
    ranks = placement.ranks
    if not ranks or len(ranks) == world_size:
        return "all"
    if len(ranks) <= 4:
        return " ".join(map(str, ranks))
    return f"{len(ranks)} of {world_size}"


def _figures(load: Load) -> tuple[str, str, str]:
    """Memory, ids and results, each of the rank with the most."""
    return _mb(load.memory), _kb(load.ids), _kb(load.results)


def _mb(values: object) -> str:
    return f"{np.max(np.asarray(values)) / _MEGA:.2f}"


def _kb(values: object) -> str:
    # A sum of cancelling numbers may be a negative zero.
    return f"{np.max(np.asarray(values)) / _KILO + 0.0:.1f}"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width; numbers right-aligned, words left-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = {
        i
        for i, column in enumerate(zip(*lines[1:], strict=True))
        if all(cell.replace(".", "").lstrip("-").isdigit() for cell in column)
    }
    return [
        "  ".join(
            cell.rjust(size) if i in numeric else cell.ljust(size)
            for i, (cell, size) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


# Number of tables with a colour of their own; the others share one.
_NAMED = 9

# (title, attribute of `Load`)
_PANELS = (
    ("memory, MB", "memory"),
    ("sent per step, MB", "sent"),
    ("rows read per step, MB", "lookups"),
)


def draw_plan(
    figures: Figures, path: str | os.PathLike[str] | None = None
) -> Any:
    """Plots memory, bytes and lookups in one panel each: a bar per rank.

    Args:
        figures: figures of the plan.
        path: file to write, None for none.

    Returns:
        The matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # It is imported here because only plots need it.
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(12, 4), layout="constrained")
    panels = sheet.subplots(1, len(_PANELS))
    for panel, (title, attribute) in zip(panels, _PANELS, strict=True):
        _draw_panel(
            panel, figures.world_size, _layers(figures.loads, attribute)
        )
        panel.set(title=title, xlabel="rank")
    panels[-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    sheet.suptitle(f"Load of {figures.world_size} ranks, by table")
    if path is not None:
        sheet.savefig(path, dpi=120)
    return sheet


def _layers(loads: Mapping[str, Load], attribute: str) -> dict[str, np.ndarray]:
    """Megabytes `[W]` by table; the smaller tables are summed into one."""
    values = {
        name: np.asarray(getattr(load, attribute)) / 1e6
        for name, load in loads.items()
    }
    # The order is by memory in all panels, so that colours are the same.
    order = sorted(loads, key=lambda name: -float(np.sum(loads[name].memory)))
    layers = {name: values[name] for name in order[:_NAMED]}
    if order[_NAMED:]:
        rest = [values[name] for name in order[_NAMED:]]
        layers[f"{len(rest)} others"] = np.sum(rest, axis=0)
    return layers


def _draw_panel(
    panel: Any, world_size: int, layers: dict[str, np.ndarray]
) -> None:
    bottom = np.zeros(world_size)
    for name, values in layers.items():
        panel.bar(range(world_size), values, bottom=bottom, label=name)
        bottom = bottom + values
    panel.xaxis.get_major_locator().set_params(integer=True)
