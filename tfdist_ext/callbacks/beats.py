# SPDX-License-Identifier: Apache-2.0
"""Steps at which the ranks tell each other how they are.

That takes an exchange, so it is not done in every step but about twice a
second, by rank 0's clock; all ranks know before which step is next.
"""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf

from tfdist_ext.collectives.collectives import Collectives

# Between two of them, about.
SECONDS = 0.5


class Beats:
    """When ranks tell each other numbers, and what they have told.

    Args:
        collectives: of the strategy; None in one process.
    """

    def __init__(self, collectives: Collectives | None) -> None:
        self._collectives = collectives
        self._steps = 0  # since the last one
        self._due = 1
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Whether the ranks tell each other something before this step."""
        self._steps += 1
        return self._steps >= self._due

    def tell(self, *mine: int) -> np.ndarray:
        """Tells the other ranks; all ranks must call.

        Args:
            *mine: numbers of this rank.

        Returns:
            int64 `[world_size, len(mine)]`.
        """
        told = np.array([[*mine, self._propose()]], np.int64)
        if self._collectives is not None:
            told = self._collectives.all_gather(
                tf.constant(told), "resume/beat"
            ).numpy()
        self._due, self._steps = int(told[0, -1]), 0
        self._last = time.monotonic()
        return told[:, :-1]

    def _propose(self) -> int:
        """Steps to the next one; at most twice as many as to this one."""
        elapsed = max(time.monotonic() - self._last, 1e-6)
        steps = int(SECONDS * self._steps / elapsed)
        return min(max(steps, 1), 2 * self._due)
