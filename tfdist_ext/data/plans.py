# SPDX-License-Identifier: Apache-2.0
"""Plans: which records of a stream each batch consists of.

A stream has parts: files, or partitions of a topic. Offsets say where in a
part a record begins: bytes of a file, rows, or offsets of Kafka. Rank 0 plans
the batches, since another rank may see an appended file or a new message
earlier or later. All ranks get its plans, and each reads its records only.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import numpy as np

# The offset after the last record that was trained, by the name of the part.
Offsets = dict[str, int]
# Name of a part, its first offset, the offset after the last record, and how
# many records these are.
Range = tuple[str, int, int, int]


class Source(Protocol):
    """Where the records of a stream are."""

    @property
    def spec(self) -> Any:
        """Nest of specs of a batch."""

    def available(
        self, offsets: Offsets, most: int, after: str
    ) -> list[tuple[str, np.ndarray]]:
        """Finds whole records that follow the offsets; does not wait.

        Args:
            offsets: offset of every part that was begun.
            most: largest number of records to return.
            after: part of the last record that was found, "" at the beginning.

        Returns:
            Parts that have such records, each with int64 `[n + 1]`: the offsets
            of n records, and the offset after the last one. With n = 0 the
            array says where a part begins that has no offset yet.
        """

    def read(self, ranges: Sequence[Range]) -> Any:
        """Reads records.

        Args:
            ranges: where they are; maybe none.

        Returns:
            A nest of arrays like `spec`, the records in order.
        """


@dataclasses.dataclass(frozen=True)
class Plan:
    """The records of a batch.

    Attributes:
        ranks: ranges of each rank, in the order of the ranks.
    """

    ranks: list[list[Range]]

    def move(self, offsets: Offsets) -> None:
        """Moves offsets to the end of the batch.

        Args:
            offsets: offsets before the batch; they are changed.
        """
        for ranges in self.ranks:
            for part, _, stop, _ in ranges:
                offsets[part] = stop


def _divided(
    found: Sequence[tuple[str, np.ndarray]], world_size: int
) -> list[list[Range]]:
    """Divides records among ranks, in order and in equal shares."""
    total = sum(len(offsets) - 1 for _, offsets in found)
    result: list[list[Range]] = []
    for rank in range(world_size):
        first = rank * total // world_size
        last = (rank + 1) * total // world_size
        ranges: list[Range] = []
        before = 0
        for part, offsets in found:
            size = len(offsets) - 1
            if size == 0 and rank == 0:
                ranges.append((part, int(offsets[0]), int(offsets[0]), 0))
            start = min(max(first - before, 0), size)
            stop = min(max(last - before, 0), size)
            if start < stop:
                ends = int(offsets[start]), int(offsets[stop])
                ranges.append((part, *ends, stop - start))
            before += size
        result.append(ranges)
    return result


def plans(
    source: Source,
    offsets: Offsets,
    world_size: int,
    batch_size: int,
    wait: float,
    linger: float,
) -> Iterator[Plan | None]:
    """Plans batches until the stream ends.

    Args:
        source: where the records are.
        offsets: offsets to begin at.
        world_size: number of ranks.
        batch_size: records of a batch of all ranks.
        wait: seconds without new records after which the stream ends.
        linger: seconds after which a batch is smaller, rather than late.

    Yields:
        A plan, or None while there are not enough records.
    """
    offsets = dict(offsets)
    found: list[tuple[str, np.ndarray]] = []
    count, begun, after = 0, 0.0, ""
    last = time.monotonic()
    while True:
        more = source.available(offsets, batch_size - count, after)
        now = time.monotonic()
        for part, ends in more:
            after, offsets[part] = part, int(ends[-1])
            found.append((part, ends))
            if len(ends) > 1:
                begun = begun if count else now
                count, last = count + len(ends) - 1, now
        ended = not more and now - last >= wait
        if count and (count >= batch_size or ended or now - begun >= linger):
            yield Plan(_divided(_joined(found), world_size))
            found, count = [], 0
        elif ended:
            return
        elif not more:
            yield None


def _joined(
    found: Sequence[tuple[str, np.ndarray]],
) -> list[tuple[str, np.ndarray]]:
    """Joins what was found in one part at several times."""
    parts: dict[str, np.ndarray] = {}
    for part, ends in found:
        before = parts.get(part)
        parts[part] = ends if before is None else np.append(before, ends[1:])
    return list(parts.items())
