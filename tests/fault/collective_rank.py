# SPDX-License-Identifier: Apache-2.0
"""One rank of a fault test: runs collectives until one fails.

Arguments: scenario (a function of this file), rank, world size, timeout,
folder, and the host of every rank if they are not all on 127.0.0.1.

Writes `ready.R` once it is in the middle of things and `result.R` (JSON: error
class, message, Unix time) when an operation has failed.
"""

import json
import pathlib
import sys
import time

import tensorflow as tf

from tfdist_ext.collectives.process_group import ProcessGroup
from tfdist_ext.ops import collective_ops


def exchange_files(folder, rank, world_size, blob):
    partial = folder / f"partial.{rank}"
    partial.write_bytes(blob)
    partial.rename(folder / f"blob.{rank}")
    paths = [folder / f"blob.{peer}" for peer in range(world_size)]
    while not all(path.exists() for path in paths):
        time.sleep(0.02)
    return [path.read_bytes() for path in paths]


def small(group, step):
    collective_ops.all_reduce(
        group, [tf.ones([4])], tag=2, label="layer dense/bucket"
    )


def large(group, step):
    rows = tf.zeros([group.world_size * 20_000, 64])
    splits = tf.fill([group.world_size], tf.constant(20_000, tf.int64))
    collective_ops.all_to_all(group, rows, splits, tag=4, label="layer emb/ids")
    collective_ops.all_reduce(group, [rows], tag=6, label="layer emb/bucket")


def chain(group, step):
    """After a few steps rank 3 sleeps, 2 waits for it, 0 and 1 wait for 2."""
    if step < 3:
        return small(group, step)
    if group.rank == 3:
        time.sleep(600)
    tag = 8 if group.rank == 2 else 10
    return collective_ops.broadcast(
        group,
        tf.ones([4]),
        root=3 if group.rank == 2 else 2,
        tag=tag,
        label="of the sleeper" if group.rank == 2 else "of the waiting",
    )


def absent(group, step):
    """After a few steps the last rank computes for ever."""
    if step < 3:
        return small(group, step)
    if group.rank == group.world_size - 1:
        time.sleep(600)
    return small(group, step)


def slow(group, step):
    """After a few steps the last rank computes for two and a half timeouts."""
    if step == 3 and group.rank == group.world_size - 1:
        time.sleep(2.5 * group.timeout)
    if step == 5:
        raise tf.errors.OutOfRangeError(None, None, "all steps are done")
    return small(group, step)


def apart(group, step):
    """After a few steps the last rank waits in another collective."""
    if step == 3 and group.rank == group.world_size - 1:
        collective_ops.barrier(group, tag=12, label="layer apart")
    return small(group, step)


def leaving(group, step):
    """After a few steps the last rank's script ends."""
    if step == 3 and group.rank == group.world_size - 1:
        sys.exit(0)
    return small(group, step)


def disagreeing(group, step):
    """After a few steps the last rank runs another op under the tag."""
    if step == 3 and group.rank == group.world_size - 1:
        return collective_ops.all_gather(
            group, tf.zeros([3], tf.int64), tag=2, label="layer other"
        )
    return small(group, step)


def main():
    scenario, rank, world_size, timeout = sys.argv[1:5]
    rank, world_size = int(rank), int(world_size)
    folder = pathlib.Path(sys.argv[5])
    hosts = sys.argv[6:] or ["127.0.0.1"] * world_size
    group = ProcessGroup(
        rank,
        world_size,
        [f"{host}:{9000 + peer}" for peer, host in enumerate(hosts)],
        lambda blob: exchange_files(folder, rank, world_size, blob),
        timeout=float(timeout),
    )
    step = 0
    while True:
        if step == 3:
            (folder / f"ready.{rank}").touch()
        try:
            globals()[scenario](group, step)
        except tf.errors.OpError as error:
            first = error
            break
        step += 1
    result = {
        "class": type(first).__name__,
        "message": first.message,
        "time": time.time(),
    }
    try:  # later operations fail at once, for the same reason
        small(group, 0)
    except tf.errors.OpError as error:
        result["later"] = error.message
        result["later_seconds"] = time.time() - result["time"]
    (folder / f"partial.{rank}").write_text(json.dumps(result))
    (folder / f"partial.{rank}").rename(folder / f"result.{rank}")


if __name__ == "__main__":
    main()
