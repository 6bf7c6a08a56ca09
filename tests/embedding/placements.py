# SPDX-License-Identifier: Apache-2.0
"""A table, and every kind of placement for it."""

import numpy as np

from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import TablePlacement

ROWS, DIM = 23, 5
TABLE = np.arange(1, ROWS * DIM + 1, dtype=np.float32).reshape(ROWS, DIM)


def kinds(ranks):
    """One of each kind; those on some ranks are not on the first ones."""
    return {
        "first": TablePlacement.table_wise(0),
        "last": TablePlacement.table_wise(ranks - 1),
        "rows": TablePlacement.row_wise(ranks),
        "columns": TablePlacement.column_wise(ranks),
        "some rows": TablePlacement(2, 1, (ranks - 1, 0)),
        "some columns": TablePlacement(1, 2, (ranks - 1, 0)),
        "grid": TablePlacement(1 + (ranks > 3), 2, tuple(range(ranks))[:4])
        if ranks > 3
        else TablePlacement(1, 2, (1, 0)),
    }


def spec_of(placement, rank, ranks):
    return ShardSpec.of("table", ROWS, DIM, placement, rank, ranks)
