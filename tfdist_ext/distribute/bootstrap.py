# SPDX-License-Identifier: Apache-2.0
"""How ranks that know their addresses connect at start-up.

TensorFlow's own server takes no part: it would listen on all interfaces and
run any op that anybody sends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.collectives import gpus
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.collectives.process_group import ALL_REDUCE_VARIABLE
from tfdist_ext.collectives.process_group import ProcessGroup
from tfdist_ext.distribute.cluster import Cluster
from tfdist_ext.launcher import ports
from tfdist_ext.rendezvous import addresses as addresses_lib
from tfdist_ext.rendezvous import connection
from tfdist_ext.rendezvous import mesh
from tfdist_ext.rendezvous import secret as secret_lib
from tfdist_ext.rendezvous.connection import Connection
from tfdist_ext.rendezvous.listening import Listening
from tfdist_ext.tables import choices


def share_a_host(addresses: Sequence[str]) -> bool:
    """Whether any two ranks do, by their addresses `host:port`."""
    hosts = [address.rpartition(":")[0] for address in addresses]
    return len(set(hosts)) < len(hosts)


def connect(
    cluster: Cluster,
    timeout: float,
    startup_timeout: float,
    transport: choices.Transport,
    allow_unauthenticated: bool = False,
) -> ProcessGroup | None:
    """Connects the ranks to each other.

    Args:
        cluster: the ranks.
        timeout: seconds, of the process group.
        startup_timeout: seconds that ranks wait for each other to start.
        transport: whether ranks of one host talk through memory.
        allow_unauthenticated: whether ranks may do without a secret where
            other users or hosts reach them.

    Returns:
        The connected process group; None for a process that trains alone.

    Raises:
        RuntimeError: the ranks did not meet.
        ValueError: the job has no secret and needs one, or it cannot be read;
            or the environment names no interface or ports of this host, no
            form of sums, or no time to poll.
    """
    addresses, rank = cluster.addresses, cluster.rank
    if len(addresses) < 2:
        return None
    if share_a_host(addresses):
        internals.stop_spinning()
    secret = secret_lib.find(os.environ)
    check_secret(addresses[0], secret, allow_unauthenticated)

    def join() -> Sequence[Connection | None]:
        connections = mesh.connect(
            rank,
            addresses,
            secret=secret,
            timeout=startup_timeout,
            reuse_port=ports.HELD_VARIABLE in os.environ,
            listening=Listening.of(os.environ),
            share_memory=transport == "auto",
            allow_unauthenticated=allow_unauthenticated,
        )
        connection.poll_busily(connections, os.environ)
        return connections

    return ProcessGroup(
        rank=rank,
        world_size=len(addresses),
        addresses=addresses,
        connect=join,
        timeout=timeout,
        all_reduce=os.environ.get(ALL_REDUCE_VARIABLE, ""),
    )


def connect_gpus(collectives: Collectives | None) -> None:
    """Lets exchanges run on GPUs, and tells what tables may have of these.

    Args:
        collectives: of the strategy; None for a process that trains alone.
    """
    if collectives is not None:
        _, collectives.gpus = gpus.connect(
            collectives.group, os.environ, gpus.visible_device()
        )


def check_secret(
    address: str, secret: bytes, allow_unauthenticated: bool
) -> None:
    """Refuses ranks without a secret where other hosts reach them.

    Args:
        address: "host:port" of rank 0.
        secret: of the job, may be empty.
        allow_unauthenticated: whether the user wants that.

    Raises:
        ValueError: says how to give a secret.
    """
    where = addresses_lib.of_this_user(*addresses_lib.split(address))
    if secret or allow_unauthenticated or isinstance(where, str):
        return
    raise ValueError(
        f"The ranks of this job start at {address}, which other hosts may "
        "reach, and have no secret: anybody who connects would join the job. "
        f"Set {secret_lib.VARIABLE} to the same text for all ranks, or "
        f"{secret_lib.FILE_VARIABLE} to the path of a file that only you can "
        "read, with the output of `openssl rand -hex 32`. In a network that "
        "you trust, HybridParallelStrategy(allow_unauthenticated=True) does "
        "without."
    )


def serve_keys(group: ProcessGroup) -> None:
    """Lets TensorFlow's handlers of preemptions agree through a group."""

    def wait(key: str, timeout_in_ms: int = 0) -> str:
        return group.await_key(key, timeout_in_ms / 1000)

    def report(code: int, message: str) -> None:
        group.leave(f"error {code}: {message}")

    internals.serve_keys(group.insert_key, wait, report)
