# SPDX-License-Identifier: Apache-2.0
"""The addresses of all ranks, however many, come in rank order."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.distribute import bootstrap


class Ranks:
    """Gathers as TensorFlow does, rows in the order of the tasks' names."""

    def __init__(self, count):
        self.rows = {}
        self.together = threading.Barrier(count, timeout=60)

    def of(self, rank):
        return _Strategy(self, rank)


class _Strategy:
    def __init__(self, ranks, rank):
        self.ranks, self.rank = ranks, rank

    def gather(self, value, axis):
        assert axis == 0
        self.ranks.rows[f"task:{self.rank}"] = value.numpy()
        self.ranks.together.wait()
        rows = [self.ranks.rows[name] for name in sorted(self.ranks.rows)]
        return tf.constant(np.concatenate(rows))


@pytest.mark.parametrize("count", [2, 11, 120])
def test_addresses_come_in_rank_order(count):
    # As Gloo's: an address of 136 bytes for every other rank.
    blobs = [bytes([rank]) * 136 * (count - 1) for rank in range(count)]
    ranks, found = Ranks(count), {}

    def work(rank):
        strategy = ranks.of(rank)
        found[rank] = bootstrap._exchange(strategy, rank, blobs[rank])

    threads = [threading.Thread(target=work, args=(r,)) for r in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(found[rank] == blobs for rank in range(count))
