# SPDX-License-Identifier: Apache-2.0
"""The Keras loop that runs, as plain data."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Loop:
    """A call of `fit`, `evaluate` or `predict`.

    Attributes:
        model: whose method it is.
        samples: of a rank in a step, None if nothing tells.
    """

    model: Any
    samples: int | None
