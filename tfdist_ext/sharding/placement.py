# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a partitioned table live ("rotated mod").

A block of `world_size` consecutive ids has exactly one row on every rank, at
local row `block = id // world_size`; a hash of the block decides which id goes
where. Load is even for ids in sequence and for ids with a stride.

    owner = (id + hash(block)) mod world_size
    hash(block) = ((block * 0x9E3779B97F4A7C15) mod 2^64) >> 32
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def local_row(ids: npt.ArrayLike, world_size: int) -> npt.NDArray[np.int64]:
    """The row of each id within its owner's shard.

    >>> local_row([0, 1, 2, 3, 4], world_size=2).tolist()
    [0, 0, 1, 1, 2]

    Args:
        ids: non-negative integers, any shape.
        world_size: number of ranks.

    Returns:
        int64 of the same shape.
    """
    return np.asarray(ids, np.int64) // world_size


def owner_of(ids: npt.ArrayLike, world_size: int) -> npt.NDArray[np.int64]:
    """The rank that owns the row of each id.

    >>> owner_of([0, 1, 2, 3, 4], world_size=2).tolist()
    [0, 1, 1, 0, 0]

    Args:
        ids: non-negative integers, any shape.
        world_size: number of ranks.

    Returns:
        int64 of the same shape.
    """
    ids = np.asarray(ids, np.int64)
    return (ids + _rotation(ids // world_size)) % world_size


def ids_of_shard(
    rank: int, world_size: int, rows: int
) -> npt.NDArray[np.int64]:
    """The ids of a shard, in the order of its local rows.

    >>> ids_of_shard(0, world_size=2, rows=5).tolist()
    [0, 3, 4]

    Args:
        rank: the owner.
        world_size: number of ranks.
        rows: rows of the whole table.

    Returns:
        int64, one per local row; the last local row is padding, without an id,
        on ranks that have no row of an incomplete last block.
    """
    block = np.arange(-(-rows // world_size), dtype=np.int64)
    ids = block * world_size + (rank - _rotation(block)) % world_size
    return ids[ids < rows]


def _rotation(block: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    with np.errstate(over="ignore"):
        product = block.astype(np.uint64) * _MULTIPLIER
    return (product >> np.uint64(32)).astype(np.int64)
