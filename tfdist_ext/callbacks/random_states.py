# SPDX-License-Identifier: Apache-2.0
"""The random generators of a process that are no variables of a model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def get() -> dict[str, Any]:
    """The states of Python's and NumPy's generators, as JSON can hold them."""
    state: Any = np.random.get_state(legacy=False)
    inner = {
        field: value.tolist() if isinstance(value, np.ndarray) else value
        for field, value in state["state"].items()
    }
    return {
        "python": random.getstate(),
        "numpy": {**state, "state": inner},
    }


def set_(states: dict[str, Any]) -> None:
    """Lets the generators go on from what `get` has returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    now: Any = np.random.get_state(legacy=False)
    if states["numpy"]["bit_generator"] == now["bit_generator"]:
        np.random.set_state(states["numpy"])
