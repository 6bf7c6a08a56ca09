# SPDX-License-Identifier: Apache-2.0
"""One rank of `test_collectives.py`: checks and counts exchanges.

The ranks share a folder for the addresses they need to connect. Every rank
checks its own results, and writes `done.R` with its statistics at the end.
"""

import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

from tests import address_files
from tfdist_ext.comm import mesh
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.ops import collective_ops

STEPS = 20


def check_step(group, step_function, step):
    """Rank r sends r + p + 1 rows to rank p, all holding its number."""
    ranks = np.arange(group.world_size)
    splits = ranks + group.rank + 1 + step % 3
    rows = tf.fill([splits.sum(), 300], float(group.rank + step))
    output, received, total = step_function(rows, splits)
    np.testing.assert_array_equal(received, splits)
    np.testing.assert_array_equal(
        output, np.repeat(ranks + step, splits)[:, None] + np.zeros(300)
    )
    expected = 3 * group.world_size * (ranks.mean() + step)
    np.testing.assert_allclose(total, np.full(100_000, expected))


def main():
    config = json.loads(os.environ["TF_CONFIG"])
    rank, world_size = config["task"]["index"], len(config["cluster"]["worker"])
    folder = pathlib.Path(sys.argv[1])
    hosts = ["127.0.0.1"] * world_size
    addresses = address_files.addresses(folder, rank, hosts)
    group = ProcessGroup(
        rank,
        world_size,
        addresses,
        lambda: mesh.connect(rank, addresses, secret=b"", timeout=60),
        timeout=60,
    )
    group.check_same(["all_to_all rows", "all_reduce total"])

    @tf.function(reduce_retracing=True)
    def step_function(rows, splits):
        output, received = collective_ops.all_to_all(
            group, rows, splits, tag=2, label="rows"
        )
        total = collective_ops.all_reduce(
            group, [tf.fill([100_000], 3 * rows[0, 0])], tag=4, label="total"
        )[0]
        return output, received, total

    for step in range(STEPS):
        check_step(group, step_function, step)
    stats = group.stats()
    assert stats.labels["total"][0] == STEPS
    (folder / f"done.{rank}").write_text(
        json.dumps([stats.bytes_sent, stats.bytes_received])
    )


if __name__ == "__main__":
    main()
