# SPDX-License-Identifier: Apache-2.0
"""The update rules in float64, as row_update_functor.h has their formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rule:
    """What entry_points.cc makes a rule of."""

    code: int
    numbers: tuple[float, ...]


LONGEST = 0.75  # of a row that is clipped

RULES = {
    "sgd": Rule(0, (0.1,)),
    "momentum": Rule(1, (0.1, 0.9, 0)),
    "nesterov": Rule(1, (0.1, 0.9, 1)),
    "adagrad": Rule(2, (0.1, 1e-7)),
    "row-wise adagrad": Rule(3, (0.1, 1e-7)),
    "adam": Rule(4, (0.05, 0.1, 0.001, 1e-7, 0)),
    "amsgrad": Rule(4, (0.05, 0.1, 0.001, 1e-7, 1)),
    "ftrl": Rule(5, (10.0, 0.5, 0.01, 0.02, 0.03)),
    "ftrl power": Rule(5, (10.0, 0.4, 0.01, 0.02, 0.03)),
}


def reference(
    name: str, table: np.ndarray, state: Any, all_rows: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Applies a rule.

    Args:
        name: the rule, "clip" to 0.75, or "scale" by 0.7.
        table: `[rows, dim]`, as floats.
        state: its slots and the batch.
        all_rows: whether rows without a gradient get one of zero.

    Returns:
        The table and the three slots afterwards, float64.
    """
    w = table.astype(np.float64)
    slots = [slot.astype(np.float64) for slot in state.slots]
    if name == "scale":
        return w * np.float32(0.7), slots
    if name == "clip":
        squares = (w[state.rows] ** 2).sum(1)
        if state.means is not None:
            squares = state.means.astype(np.float64)
        longer = np.sqrt(squares) > LONGEST
        part = LONGEST / np.sqrt(squares[longer])
        w[state.rows[longer]] *= part[:, np.newaxis]
        return w, slots
    rows, g = state.rows, state.grads.astype(np.float64)
    if all_rows:
        every = np.zeros_like(w)
        every[rows] = g
        rows, g = np.arange(len(w)), every
    n = [float(np.float32(value)) for value in RULES[name].numbers]
    a, b, c = (slot[rows] for slot in slots)
    if name == "sgd":
        w[rows] -= n[0] * g
    elif name in ("momentum", "nesterov"):
        a = n[1] * a - n[0] * g
        w[rows] += n[1] * a - n[0] * g if n[2] else a
    elif name == "adagrad":
        a = a + g**2
        w[rows] -= n[0] * g / np.sqrt(a + n[1])
    elif name == "row-wise adagrad":
        means = (g**2).mean(1) if state.means is None else state.means
        a = a + means
        w[rows] -= n[0] * g / np.sqrt(a + n[1])[:, np.newaxis]
    elif name in ("adam", "amsgrad"):
        a = a + n[1] * (g - a)
        b = b + n[2] * (g**2 - b)
        if n[4]:
            # A NaN that is in the slot stays; one that comes does not count.
            c = np.where(c < b, b, c)
        w[rows] -= n[0] * a / (np.sqrt(c if n[4] else b) + n[3])
    else:
        w[rows], a, b = follow_leader(n, w[rows], a, b, g)
    for slot, new in zip(slots, (a, b, c), strict=True):
        slot[rows] = new
    return w, slots


def follow_leader(
    n: list[float],
    w: np.ndarray,
    a: np.ndarray,
    z: np.ndarray,
    g: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inverse_rate, power, l1, twice_l2, twice_shrinkage = n
    total = a + g**2
    sigma = (total**power - a**power) * inverse_rate
    z = z + g + twice_shrinkage * w - sigma * w
    clipped = np.clip(z, -l1, l1)
    w = (clipped - z) / (total**power * inverse_rate + twice_l2)
    return w, total, z
