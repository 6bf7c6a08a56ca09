# SPDX-License-Identifier: Apache-2.0
"""Ranks as the tasks of one barrier stage of Spark.

def train():
    strategy = tfdist_ext.HybridParallelStrategy()
    ...

tfdist_ext.spark.run(train, ranks=4)
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import TypeVar

from tfdist_ext.comm import addresses
from tfdist_ext.comm import handshake as secret_lib
from tfdist_ext.comm import listener

__all__ = ["run"]

T = TypeVar("T")


def run(fn: Callable[[], T], ranks: int, spark: Any = None) -> list[T]:
    """Calls a function in as many tasks of Spark, which are the ranks.

    Spark starts them all at once, or none; if one fails, all do. `fn` should
    close its strategy (`with HybridParallelStrategy() as strategy:`), as Spark
    keeps its processes for other tasks.

    Args:
        fn: makes a strategy and trains; pickled by Spark.
        ranks: how many; the cluster must have slots for all.
        spark: the `SparkSession`; by default the active one.

    Returns:
        What `fn` has returned, in the order of ranks.

    Raises:
        ImportError: pyspark is not installed.
        ValueError: there is no session, or fewer ranks than one.
    """
    from pyspark.sql import SparkSession

    spark = spark or SparkSession.getActiveSession()
    if spark is None:
        raise ValueError(
            "tfdist_ext.spark.run needs a SparkSession, and none is active. "
            "Make one, or give it as `spark`."
        )
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1. Received: ranks={ranks}")
    secret = secrets.token_hex(32)

    def task(_: Iterator[object]) -> Iterator[T]:
        from pyspark import BarrierTaskContext

        with _place(BarrierTaskContext.get(), secret):
            result = fn()
        yield result

    tasks = spark.sparkContext.parallelize(range(ranks), ranks).barrier()
    return list(tasks.mapPartitions(task).collect())


@contextlib.contextmanager
def _place(context: Any, secret: str) -> Iterator[None]:
    """Tells this process, for a while, which rank it is."""
    rank = context.partitionId()
    host = context.getTaskInfos()[rank].address.rpartition(":")[0]
    # Not loopback: the address others use may belong to any interface.
    with listener.reserve_ports(1, "") as reserved:
        workers = context.allGather(addresses.join(host, reserved[0]))
        config = {
            "cluster": {"worker": list(workers)},
            "task": {"type": "worker", "index": rank},
        }
        placed = {
            "TF_CONFIG": json.dumps(config),
            secret_lib.SECRET: secret,
            listener.HELD_VARIABLE: "1",
        }
        before = {name: os.environ.get(name) for name in placed}
        cores = str(max(1, context.cpus()))
        os.environ.setdefault("OMP_NUM_THREADS", cores)
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", cores)
        os.environ.update(placed)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
