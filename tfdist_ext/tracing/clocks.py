# SPDX-License-Identifier: Apache-2.0
"""Differences of the clocks of ranks, from messages that they exchange."""

from __future__ import annotations

from collections.abc import Sequence


def offsets(
    sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    """Offsets of clocks to that of rank 0, and how far each may be wrong.

    In a round every rank sends its time to all, and notes when it has that of
    all. A message arrives after it was sent, so that a round bounds the
    difference of two clocks from both sides; of many the closest count.

    >>> offsets([[0, 1000]], [[30, 1010]])
    [(0.0, 0.0), (990.0, 20.0)]

    Args:
        sent: by round and rank, when it began to send, of its own clock.
        received: by round and rank, when it had heard all.

    Returns:
        By rank, what to subtract from its clock, and the largest error.
    """
    result = [(0.0, 0.0)]
    for rank in range(1, len(sent[0])):
        # received[rank] >= sent[0] + offset, and the other way round.
        most = min(
            there[rank] - here[0]
            for here, there in zip(sent, received, strict=True)
        )
        least = max(
            here[rank] - there[0]
            for here, there in zip(sent, received, strict=True)
        )
        result.append(((most + least) / 2, (most - least) / 2))
    return result
