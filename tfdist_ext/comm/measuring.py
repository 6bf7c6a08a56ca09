# SPDX-License-Identifier: Apache-2.0
"""Measures the machines and links, for plans."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable

import tensorflow as tf

from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.tables.problem import Machine
from tfdist_ext.tables.problem import Setting

# The size of a round grows until the round takes this long. The result is the
# median of several rounds, so that rounds disturbed by other programs do not
# count.
_SECONDS = 0.03
_ROUNDS, _SECONDS_OF_ROUNDS = 7, 0.3
_FIRST_NUMBERS, _MOST_NUMBERS = 1 << 13, 1 << 24
# A table that is larger than any cache, with rows of a usual width.
_ROWS, _DIM = 1 << 18, 64
_FIRST_IDS, _MOST_IDS = 1 << 12, 1 << 18
_IDS_OF_SAMPLE = 16
_CACHE_LINE = 64


def measure_machine(
    strategy: tf.distribute.Strategy | None = None,
) -> Machine:
    """Measures the links between ranks and the memory, in under a second.

    All ranks must call it. They measure at the same time, as they train at the
    same time. Rank 0 logs the result in one line.

    Args:
        strategy: strategy of the ranks; None for the one in scope.

    Returns:
        The measured machine, the same on all ranks: every round counts as long
        as on its slowest rank. A single rank has no link; the link speed is
        then the default of `plan`.
    """
    strategy = strategy or tf.distribute.get_strategy()
    collectives = getattr(strategy, "collectives", None)
    if collectives is None:
        machine = Machine(
            Setting(1).link_bytes_per_second, _read_speed(None), _cores(None)
        )
    else:
        with collectives.joint_call("measure_machine"):
            machine = Machine(
                _link_speed(collectives),
                _read_speed(collectives),
                _least(_cores(collectives), collectives),
            )
    if collectives is None or collectives.group.rank == 0:
        logging.getLogger("tfdist_ext").info("Measured: %s", machine)
    return machine


def _link_speed(collectives: Collectives) -> float:
    """Bytes per second that this rank sends, and receives, to all ranks."""
    peers = collectives.group.world_size - 1

    def send(numbers: int) -> float:
        splits = [numbers] * (peers + 1)
        splits[collectives.group.rank] = 0
        values = tf.zeros([numbers * peers])
        return _timed(
            lambda: collectives.all_to_all(
                values, tf.constant(splits, tf.int64), "machine/link"
            ),
            collectives,
        )

    numbers, seconds = _repeated(
        send, _FIRST_NUMBERS, _MOST_NUMBERS // peers, collectives
    )
    return 4.0 * numbers * peers / seconds


def _read_speed(collectives: Collectives | None) -> float:
    """Bytes of rows read per second, plus one cache line per row.

    Plans count bytes in the same way.
    """
    table = tf.ones([_ROWS, _DIM])

    def read(count: int) -> float:
        # It reads as a lookup does: random rows, summed by sample.
        ids = tf.random.stateless_uniform([count], (1, 2), 0, _ROWS, tf.int64)
        samples = tf.range(count, dtype=tf.int32) // _IDS_OF_SAMPLE
        return _timed(
            lambda: tf.sparse.segment_sum(table, ids, samples), collectives
        )

    count, seconds = _repeated(read, _FIRST_IDS, _MOST_IDS, collectives)
    return count * (4.0 * _DIM + _CACHE_LINE) / seconds


def _cores(collectives: Collectives | None) -> float:
    """Cores of this machine per rank on it."""
    addresses = collectives.group.addresses if collectives else ("",)
    hosts = [address.rsplit(":", 1)[0] for address in addresses]
    own = hosts[collectives.group.rank if collectives else 0]
    return len(os.sched_getaffinity(0)) / hosts.count(own)


def _repeated(
    measure: Callable[[int], float],
    size: int,
    most: int,
    collectives: Collectives | None,
) -> tuple[int, float]:
    """Finds a size that takes long enough; returns it and its median time.

    Args:
        measure: returns the seconds that a size takes, the same on all ranks.
        size: first size.
        most: largest size.
        collectives: collectives of the ranks, which must choose the same size.
    """
    measure(size)  # the first round takes longer
    seconds = measure(size)
    while seconds < _SECONDS and 2 * size <= most:
        size = min(max(2, int(_SECONDS / max(seconds, 1e-6))) * size, most)
        seconds = measure(size)
    rounds = int(min(max(_SECONDS_OF_ROUNDS / seconds, 1), _ROUNDS))
    return size, statistics.median(measure(size) for _ in range(rounds))


def _timed(
    function: Callable[[], object], collectives: Collectives | None
) -> float:
    """Seconds that the slowest rank takes, on all ranks."""
    if collectives is not None:
        collectives.barrier("machine/start")
    start = time.perf_counter()
    function()
    seconds = time.perf_counter() - start
    if collectives is None:
        return seconds
    return -_least(-seconds, collectives)


def _least(value: float, collectives: Collectives) -> float:
    everyone = collectives.all_gather(
        tf.constant([value], tf.float64), "machine/values"
    )
    return float(tf.reduce_min(everyone))
