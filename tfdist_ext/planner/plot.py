# SPDX-License-Identifier: Apache-2.0
"""Draws what a sharding plan loads each rank with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist_ext.planner.figures import Figures
from tfdist_ext.planner.load import Load

# Tables that get a colour of their own; the others are drawn as one.
_NAMED = 9

# (title, attribute of `Load`)
_PANELS = (
    ("memory, MB", "memory"),
    ("sent per step, MB", "sent"),
    ("rows read per step, MB", "lookups"),
)


def draw(figures: Figures, path: str | os.PathLike[str] | None = None) -> Any:
    """One panel each for memory, bytes and lookups: a bar per rank.

    Args:
        figures: of the plan.
        path: file to write, if any.

    Returns:
        The matplotlib Figure.

    Raises:
        ImportError: without matplotlib.
    """
    # Imported here: only plots need it.
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


def _layers(loads: Mapping[str, Load], attribute: str) -> dict[str, Any]:
    """Megabytes `[W]` by table, the smaller tables as one."""
    values = {
        name: np.asarray(getattr(load, attribute)) / 1e6
        for name, load in loads.items()
    }
    # By memory in every panel, so that colours mean the same.
    order = sorted(loads, key=lambda name: -float(np.sum(loads[name].memory)))
    layers = {name: values[name] for name in order[:_NAMED]}
    if order[_NAMED:]:
        rest = [values[name] for name in order[_NAMED:]]
        layers[f"{len(rest)} others"] = np.sum(rest, axis=0)
    return layers


def _draw_panel(panel: Any, world_size: int, layers: dict[str, Any]) -> None:
    bottom = np.zeros(world_size)
    for name, values in layers.items():
        panel.bar(range(world_size), values, bottom=bottom, label=name)
        bottom = bottom + values
    panel.xaxis.get_major_locator().set_params(integer=True)
