# SPDX-License-Identifier: Apache-2.0
"""What rank 0 says, known to all ranks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist_ext.collectives.collectives import Collectives


def text_of_first_rank(
    text: str, collectives: Collectives | None, label: str
) -> str:
    """The text that rank 0 has given; all ranks must call.

    Args:
        text: of this rank.
        collectives: of the strategy; None in one process.
        label: names the exchange in errors.
    """
    if collectives is None:
        return text
    mine = text.encode() if collectives.group.rank == 0 else b""
    given = tf.constant(np.frombuffer(mine, np.uint8))
    return str(collectives.all_gather(given, label).numpy().tobytes().decode())
