# SPDX-License-Identifier: Apache-2.0
"""One rank of a fault test: runs collectives until one fails.

Arguments: scenario (a function of this file), rank, world size, timeout,
folder, and the host of every rank if they are not all on 127.0.0.1.

Writes `ready.R` once it is in the middle of things and `result.R` (JSON: error
class, message, Unix time) when an operation has failed.
"""

import json
import os
import pathlib
import signal
import sys
import threading
import time

import tensorflow as tf

from tests import address_files
from tests.fake_gpu import emulation
from tfdist_ext.comm import mesh
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.ops import collective_ops
from tfdist_ext.ops import group_ops


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


def counted(group, step):
    """Says after each step how many there were."""
    small(group, step)
    folder = pathlib.Path(sys.argv[5])
    (folder / f"partial.{group.rank}").write_text(str(step))
    (folder / f"partial.{group.rank}").rename(folder / f"steps.{group.rank}")
    time.sleep(0.01)


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


def failing(group, step):
    """After a few steps an op of the last rank's step fails beside another."""
    if step < 3 or group.rank < group.world_size - 1:
        return small(group, step)

    def fail():
        time.sleep(0.5)  # the exchange has begun
        raise RuntimeError("too many")

    @tf.function
    def fails_while_it_waits():
        collective_ops.all_gather(
            group, tf.zeros([1]), tag=12, label="layer apart"
        )
        tf.py_function(fail, [], [])

    try:
        fails_while_it_waits()
    except tf.errors.UnknownError as error:
        raise ValueError("no step") from error


def dying_parent(group, step):
    """After a few steps the last rank dies; a child of it lives on."""
    if step == 3 and group.rank == group.world_size - 1:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return small(group, step)


def ending_child(group, step):
    """Children of all ranks end, as Python does; only then the last rank."""
    if step in (3, 4):
        if (child := os.fork()) == 0:
            sys.exit(0)  # runs what is registered with atexit
        assert os.waitpid(child, 0)[1] == 0
    if step == 50 and group.rank == group.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return small(group, step)


def disagreeing(group, step):
    """After a few steps the last rank runs another op under the tag."""
    if step == 3 and group.rank == group.world_size - 1:
        return collective_ops.all_gather(
            group, tf.zeros([3], tf.int64), tag=2, label="layer other"
        )
    return small(group, step)


def between_gpus(group, step):
    """GPUs that are stand-ins; in the fifth exchange one of them is no more."""
    if step == 0:
        path = os.environ["TFDIST_TEST_EMULATED"]
        ops = emulation.load(pathlib.Path(path))
        group_ops.library = lambda: ops
        assert emulation.connect(group, path) == ""
    emulation.on_gpu(
        lambda: collective_ops.all_reduce(
            group, [tf.ones([4])], tag=12, label="layer dense/bucket"
        )
    )()


def leaving_gpus(group, step):
    """The last rank's script ends while NCCL is at work, and does not end."""
    if step == 4 and group.rank == group.world_size - 1:
        arguments = (group, step)
        threading.Thread(
            target=between_gpus, args=arguments, daemon=True
        ).start()
        time.sleep(1)
        sys.exit(0)
    between_gpus(group, step)


def main():
    scenario, rank, world_size, timeout = sys.argv[1:5]
    rank, world_size = int(rank), int(world_size)
    folder = pathlib.Path(sys.argv[5])
    hosts = sys.argv[6:] or ["127.0.0.1"] * world_size
    addresses = address_files.addresses(folder, rank, hosts)
    group = ProcessGroup(
        rank,
        world_size,
        addresses,
        lambda: mesh.connect(rank, addresses, secret=b"", timeout=60),
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
        "step": step,
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
