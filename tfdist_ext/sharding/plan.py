# SPDX-License-Identifier: Apache-2.0
"""Chooses how to place a table from what its exchanges cost (no TensorFlow).

Bytes that leave a rank per sample and step, for W ranks, z ids per sample,
width d and about 1.4 bytes per coded id (see docs/data_path.md):

    row      1.4 z (W-1)/W + 8 d min(z, W) (W-1)/W
    column   1.4 z (W-1)   + 8 d (W-1)/W

A row-placed sample is pooled by up to min(z, W) owners, each of which sends
one result and gets one gradient; a column-placed one sends its ids to all.
"""

from __future__ import annotations

from typing import Any
from typing import Literal

_ID_BYTES = 1.4
_NUMBER_BYTES = 4
# What is assumed when the input does not tell how many ids a sample has.
_USUAL_HOTNESS = 100
# A table of this size is cheaper to copy than to ask for.
_REPLICATED_BYTES = 32 << 10


def hotness(input_shape: Any, input_dim: int) -> int | None:
    """Ids per sample, read off the shape of an input of ids.

    Args:
        input_shape: shape of the input, or a list of shapes.
        input_dim: rows of the table; a last dimension of this size is a
            SparseTensor's and tells nothing.

    Returns:
        Ids per sample, None if unknown.
    """
    shape = list(input_shape)
    if shape and isinstance(shape[0], list | tuple):
        known = [hotness(part, input_dim) for part in shape]
        return None if None in known else sum(k for k in known if k)
    if len(shape) == 1:
        return 1
    return None if shape[-1] == input_dim else shape[-1]


def bytes_per_sample(
    placement: str, dim: int, world_size: int, ids_per_sample: int
) -> float:
    """Bytes that one sample's ids, results and gradients send.

    Args:
        placement: "row" or "column".
        dim: width of the table.
        world_size: number of ranks.
        ids_per_sample: hotness.
    """
    others = world_size - 1
    results = 2 * _NUMBER_BYTES * dim * others / world_size
    ids = _ID_BYTES * ids_per_sample
    if placement == "column":
        return ids * others + results
    return ids * others / world_size + results * min(ids_per_sample, world_size)


def choose_sharding(
    rows: int, dim: int, world_size: int, ids_per_sample: int | None
) -> Literal["row", "column", "replicated"]:
    """The placement that `sharding="auto"` stands for.

    Args:
        rows: rows of the table.
        dim: width of the table.
        world_size: number of ranks.
        ids_per_sample: hotness, None if unknown.

    Returns:
        "replicated" for a tiny table, else the cheaper of the others.
    """
    if rows * dim * _NUMBER_BYTES <= _REPLICATED_BYTES:
        return "replicated"
    z = ids_per_sample or _USUAL_HOTNESS
    if dim < world_size:
        return "row"
    column = bytes_per_sample("column", dim, world_size, z)
    row = bytes_per_sample("row", dim, world_size, z)
    return "column" if column < row else "row"
