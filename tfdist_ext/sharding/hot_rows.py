# SPDX-License-Identifier: Apache-2.0
"""The rows of a partitioned table that every rank holds.

They lie behind the rows that a rank owns, in the table and in its slots. All
ranks train them alike. The place that a hot row has among those of its owner is
not used, and brought up to date when the owner's rows are read as a part of
the whole table.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist_ext.sharding import kernel_reads
from tfdist_ext.tables import rotated_mod
from tfdist_ext.tables.shard_spec import ShardSpec


def owned_rows(variable: tf.Variable, spec: ShardSpec) -> tf.Tensor:
    """The rows that this rank owns, the hot ones among them as trained.

    Args:
        variable: the shard, or a slot of it.
        spec: what it holds.

    Returns:
        `[local_rows, local_dim]`, or `[local_rows]` of such a slot.
    """
    if not spec.hot_ids:
        return variable.read_value()
    if spec.cell is not None:
        ids = np.array(spec.hot_ids, np.int64)
        mine = rotated_mod.part_of(ids, spec.row_parts) == spec.cell[0]
        hot = spec.local_rows + np.flatnonzero(mine)
        with kernel_reads.allowed():
            trained = variable.sparse_read(hot)
        rows = rotated_mod.local_row(ids[mine], spec.row_parts)
        variable.scatter_update(tf.IndexedSlices(trained, rows))
    return variable.read_value()[: spec.local_rows]


def ids_between(spec: ShardSpec, first: int, end: int) -> slice:
    """Which of the hot ids lie in `[first, end)`."""
    return slice(*np.searchsorted(spec.hot_ids, [first, end]).tolist())
