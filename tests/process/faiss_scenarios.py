# SPDX-License-Identifier: Apache-2.0
"""Indexes for faiss of candidates that ranks store."""

import faiss
import numpy as np
import pytest
from retrieval_scenarios import DIM
from retrieval_scenarios import ROWS
from retrieval_scenarios import start
from retrieval_scenarios import whole_numbers

from tfdist_ext.layers import Embedding
from tfdist_ext.layers import ShardedTopK


def exports(strategy, folder):
    """An index of a partitioned table; all ranks get the errors of rank 0."""
    table = whole_numbers(7, ROWS, DIM)
    with strategy.scope():
        layer = Embedding(ROWS, DIM, start(7), sharding="row_wise")
        layer.build(None)
        index = ShardedTopK(k=3).index(layer, rows=np.arange(ROWS)[::-1])
    for wrong in ("Flatt", "IVF999,Flat"):
        with pytest.raises(Exception, match=f"factory='{wrong}'"):
            index.export_faiss(folder / "index", wrong)
    facts = index.export_faiss(folder / "index", "Flat", queries=table)
    assert (facts["recall"], facts["queries"]) == (1.0, ROWS)
    found = faiss.read_index(str(folder / "index"))
    scores, _ = found.search(np.asarray(table, np.float32), 3)
    np.testing.assert_array_equal(scores, index(table.astype("float32"))[0])
