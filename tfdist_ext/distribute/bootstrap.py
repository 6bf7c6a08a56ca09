# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a TF_CONFIG cluster find each other at start-up."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.collectives.process_group import ProcessGroup
from tfdist_ext.distribute.cluster import Cluster


def prepare(cluster: Cluster, timeout: float, startup_timeout: float) -> None:
    """Sets TensorFlow's own timeouts and its threads.

    Args:
        cluster: the ranks.
        timeout: seconds of silence after which a peer counts as dead.
        startup_timeout: seconds that ranks wait for each other to start.
    """
    if len(cluster.addresses) > 1:
        internals.configure_coordination(
            {job: len(tasks) for job, tasks in cluster.jobs.items()},
            startup_timeout,
            # Heartbeats share the link with the exchanges: they must never
            # be what kills a busy job, so they get more time than these.
            max(2 * timeout, 30.0),
        )
    if share_a_host(cluster.addresses):
        internals.stop_spinning()


def share_a_host(addresses: Sequence[str]) -> bool:
    """Whether any two ranks do, by their addresses `host:port`."""
    hosts = [address.rpartition(":")[0] for address in addresses]
    return len(set(hosts)) < len(hosts)


@contextlib.contextmanager
def explained(address: str) -> Iterator[None]:
    """Says what to do where TensorFlow's own errors at its start do not.

    Args:
        address: of this rank.

    Raises:
        RuntimeError: TensorFlow was used before the strategy, or its server
            cannot have the port of the address.
    """
    try:
        yield
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise RuntimeError(
            "HybridParallelStrategy must be created before anything else "
            "uses TensorFlow: its server starts with the first op. Create "
            "the strategy, once, at the top of the program, before tensors, "
            "datasets, layers and seeds."
        ) from error
    except tf.errors.UnknownError as error:
        if "Could not start gRPC server" not in str(error):
            raise
        raise RuntimeError(
            f"TensorFlow's server cannot listen on port "
            f"{address.rpartition(':')[2]} of this rank's address {address!r} "
            "in TF_CONFIG. Another process has it: perhaps one of an earlier "
            "run, or one with the same task index. Give every process its own "
            "index, and every task of a host a free port."
        ) from error


@contextlib.contextmanager
def waiting_for_all_ranks_to_start(startup_timeout: float) -> Iterator[None]:
    """Ends the process, with a traceback, if the ranks do not all start.

    TensorFlow's server on the first rank waits for the others without a
    limit and holds Python's lock, so only the fault handler can end it.

    Args:
        startup_timeout: seconds.
    """
    # TensorFlow's own limit, on the other ranks, says more: it comes first.
    faulthandler.dump_traceback_later(startup_timeout + 15, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def connect(strategy: Any, cluster: Cluster, timeout: float) -> ProcessGroup:
    """Connects the ranks to each other.

    Args:
        strategy: a multi-worker strategy whose stock collectives work.
        cluster: its ranks.
        timeout: seconds, of the process group.

    Returns:
        The connected process group.
    """
    extended = strategy.extended
    rank = extended._id_in_cluster
    return ProcessGroup(
        rank=rank,
        world_size=extended._num_workers,
        addresses=cluster.addresses,
        exchange=lambda blob: _exchange(strategy, rank, blob),
        timeout=timeout,
    )


def _exchange(strategy: Any, rank: int, blob: bytes) -> list[bytes]:
    """Every rank's blob in rank order, by TensorFlow's own collectives.

    They order rows by the names of the tasks, where `task:10` comes before
    `task:2`. A row therefore says whose it is: the rank (int32) and the blob,
    which is as long on every rank.
    """
    row = np.frombuffer(np.array(rank, "<i4").tobytes() + blob, np.uint8)
    rows = strategy.gather(tf.constant(row[None].astype(np.int32)), axis=0)
    blobs = {}
    for other in rows.numpy().astype(np.uint8):
        blobs[int.from_bytes(other[:4].tobytes(), "little")] = other[4:]
    return [blobs[sender].tobytes() for sender in sorted(blobs)]
