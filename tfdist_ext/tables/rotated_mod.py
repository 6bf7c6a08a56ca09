# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a partitioned table live ("rotated mod").

A block of `row_parts` consecutive ids has exactly one row in every part, at
local row `block = id // row_parts`; a hash of the block decides which id goes
where. Load is even for ids in sequence and for ids with a stride.

    part = (id + hash(block)) mod row_parts
    hash(block) = ((block * 0x9E3779B97F4A7C15) mod 2^64) >> 32
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def local_row(ids: npt.ArrayLike, row_parts: int) -> npt.NDArray[np.int64]:
    """The row of each id within its part.

    >>> local_row([0, 1, 2, 3, 4], row_parts=2).tolist()
    [0, 0, 1, 1, 2]

    Args:
        ids: non-negative integers, any shape.
        row_parts: number of parts of the rows.

    Returns:
        int64 of the same shape.
    """
    return np.asarray(ids, np.int64) // row_parts


def part_of(ids: npt.ArrayLike, row_parts: int) -> npt.NDArray[np.int64]:
    """The part that holds the row of each id.

    >>> part_of([0, 1, 2, 3, 4], row_parts=2).tolist()
    [0, 1, 1, 0, 0]

    Args:
        ids: non-negative integers, any shape.
        row_parts: number of parts of the rows.

    Returns:
        int64 of the same shape.
    """
    ids = np.asarray(ids, np.int64)
    return (ids + _rotation(ids // row_parts)) % row_parts


def ids_of_part(
    part: int,
    row_parts: int,
    rows: int,
    first: int = 0,
    end: int | None = None,
) -> npt.NDArray[np.int64]:
    """The ids of a part, in the order of its local rows.

    >>> ids_of_part(0, row_parts=2, rows=5).tolist()
    [0, 3, 4]

    Args:
        part: which one.
        row_parts: number of parts of the rows.
        rows: rows of the whole table.
        first: the local row to begin with.
        end: the local row to end before, None for all.

    Returns:
        int64, one per local row; the last local row is padding, without an id,
        in parts that have no row of an incomplete last block.
    """
    blocks = -(-rows // row_parts)
    last = blocks if end is None else min(end, blocks)
    ids = ids_at(np.arange(first, last), part, row_parts)
    return ids[ids < rows]


def ids_at(
    local_rows: npt.ArrayLike, part: int, row_parts: int
) -> npt.NDArray[np.int64]:
    """The ids that have these local rows of a part.

    >>> ids_at([0, 2], part=0, row_parts=2).tolist()
    [0, 4]

    Args:
        local_rows: non-negative integers, any shape.
        part: which one.
        row_parts: number of parts of the rows.

    Returns:
        int64 of the same shape; that of padding is not below the table's rows.
    """
    block = np.asarray(local_rows, np.int64)
    return block * row_parts + (part - _rotation(block)) % row_parts


def _rotation(block: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    with np.errstate(over="ignore"):
        product = block.astype(np.uint64) * _MULTIPLIER
    return (product >> np.uint64(32)).astype(np.int64)
