# SPDX-License-Identifier: Apache-2.0
"""What ranks do beyond their exchanges, and whether it is the same."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.collectives.collectives import Collectives


def agree(collectives: Collectives, lines: Sequence[str]) -> None:
    """Compares what the ranks are about to do; all must call.

    Of a step that is traced the lines are compared with its exchanges.

    Args:
        collectives: of the strategy.
        lines: the same on all ranks.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, with the first line
            that differs, and whose it is.
    """
    if tf.executing_eagerly():
        collectives.group.check_same(lines)
    elif collectives.step is not None:
        collectives.step.exchanges += lines
