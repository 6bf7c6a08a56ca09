# SPDX-License-Identifier: Apache-2.0
"""A table in blocks of rows, which the ranks have one after the other.

Every round each rank gets another block of consecutive rows, all columns of
them, put together from the parts of all ranks. So ranks write a whole table
side by side, in memory for a few blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.keras_internals import value_of
from tfdist_ext.marks import shard_spec
from tfdist_ext.sharding import whole_tables

if TYPE_CHECKING:
    from tfdist_ext.collectives.collectives import Collectives


def row_blocks(
    variable: Any, collectives: Collectives | None, numbers: int = 1 << 24
) -> Iterator[tuple[int, np.ndarray]]:
    """This rank's blocks of a table; all ranks must take all of theirs.

    Args:
        variable: a shard, or a table that every rank has whole, which rank 0
            gives.
        collectives: of the strategy, None in one process.
        numbers: of a block, about.

    Yields:
        The first row of a block, and the block `[n, dim]`.
    """
    spec, inner = shard_spec(variable), value_of(variable)
    if spec is None or collectives is None:
        if collectives is None or collectives.group.rank == 0:
            yield from _blocks_of_whole(inner, numbers)
        return
    owned = inner.read_value()
    ranks = spec.world_size
    # Local rows of all parts, one behind the other, are rows of the table.
    local_rows = -(-spec.rows // spec.row_parts)
    limit = max(1, numbers // (spec.dim * spec.row_parts))
    step = min(limit, -(-local_rows // ranks))
    for start in range(0, local_rows, ranks * step):
        sent = owned[start : start + ranks * step]
        places = np.minimum(np.arange(ranks + 1) * step, sent.shape[0])
        flat, _ = collectives.all_to_all(
            tf.reshape(sent, [-1]),
            tf.constant(np.diff(places) * spec.local_dim, tf.int64),
            f"{spec.table}/blocks",
        )
        mine = start + spec.rank * step
        first = mine * spec.row_parts
        if first < spec.rows:
            yield (
                first,
                whole_tables.assemble(flat.numpy(), spec, 2, mine, step),
            )


def _blocks_of_whole(
    inner: Any, numbers: int
) -> Iterator[tuple[int, np.ndarray]]:
    rows = tf.convert_to_tensor(inner)
    step = max(1, numbers // int(rows.shape[1]))
    for first in range(0, rows.shape[0], step):
        yield first, rows[first : first + step].numpy()
