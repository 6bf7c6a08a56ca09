# SPDX-License-Identifier: Apache-2.0
"""How the ranks of another launcher learn each other's addresses.

Their environment names that of rank 0 only. There they tell each other by
which address each is reached:

    rank 1 -> rank 0   "10.0.0.2"
    rank 0 -> rank 1   "10.0.0.1", "10.0.0.2", ...
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from typing import Any

import tensorflow as tf

from tfdist_ext.distribute import bootstrap
from tfdist_ext.distribute import cluster as cluster_lib
from tfdist_ext.distribute import host_share
from tfdist_ext.distribute.cluster import Cluster
from tfdist_ext.launcher import key_value_store
from tfdist_ext.launcher.launched import Launched
from tfdist_ext.rendezvous import addresses as addresses_lib
from tfdist_ext.rendezvous import connector
from tfdist_ext.rendezvous import ranks
from tfdist_ext.rendezvous import secret as secret_lib


def locate(
    resolver: Any, timeout: float, allow_unauthenticated: bool = False
) -> tuple[Any, Cluster]:
    """Finds the ranks, by TF_CONFIG or what else a launcher has said.

    In the latter case this rank also takes its share of its host.

    Args:
        resolver: the user's; None for that of TF_CONFIG.
        timeout: seconds that ranks wait for each other.
        allow_unauthenticated: see `bootstrap.check_secret`.

    Returns:
        A resolver that knows all ranks, and what it says.

    Raises:
        RuntimeError: the ranks cannot meet, or did not.
        ValueError: TF_CONFIG is malformed, or an address cannot be used.
    """
    resolvers = tf.distribute.cluster_resolver
    resolver = resolver or resolvers.TFConfigClusterResolver()
    cluster = cluster_lib.read(resolver)
    launched = cluster.launched
    if launched is None:
        return resolver, cluster
    host_share.take(launched)
    if launched.store:
        launched = _ask_store(launched, timeout)
    own_host = _own_host(launched, timeout)
    secret = secret_lib.find(os.environ)
    bootstrap.check_secret(launched.master, secret, allow_unauthenticated)
    hosts = ranks.meet(
        launched.rank,
        launched.names,
        own_host.encode(),
        secret=secret,
        timeout=timeout,
        allow_unauthenticated=allow_unauthenticated,
    )
    port = addresses_lib.split(launched.master)[1]
    addresses = [
        addresses_lib.join(host.decode(), port + rank)
        for rank, host in enumerate(hosts)
    ]
    jobs = {cluster.job: addresses}
    known = resolvers.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type=cluster.job, task_id=cluster.index
    )
    return known, dataclasses.replace(cluster, jobs=jobs)


def _ask_store(launched: Launched, timeout: float) -> Launched:
    """Learns the host of rank 0, which tells it the store of horovodrun."""
    store = addresses_lib.split(launched.store)
    if launched.rank == 0:
        host = _way_to(launched.store, timeout)
        key_value_store.put(store, host)
    else:
        host = key_value_store.get(store, timeout)
    port = addresses_lib.split(launched.master)[1]
    return dataclasses.replace(launched, master=addresses_lib.join(host, port))


def _own_host(launched: Launched, timeout: float) -> str:
    """Numeric address of this host on the way to rank 0's."""
    if launched.rank != 0:
        return _way_to(launched.master, timeout)
    numeric = addresses_lib.bind_address(launched.master)
    _check_first(launched, numeric)
    return numeric


def _way_to(address: str, timeout: float) -> str:
    """Numeric address of this host by which an address is reached.

    Args:
        address: "host:port".
        timeout: seconds to wait until its name can be resolved.

    Raises:
        ValueError: it cannot be.
    """
    began = time.monotonic()
    while True:
        try:
            numeric = addresses_lib.bind_address(address)
            break
        except ValueError:
            left = began + timeout - time.monotonic()
            if left <= 0:
                raise
            time.sleep(min(left, connector.pause(timeout - left)))
    port = addresses_lib.split(address)[1]
    family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((numeric, port))  # sends nothing
        return str(probe.getsockname()[0])


def _check_first(launched: Launched, numeric: str) -> None:
    """Refuses an address at which the other ranks cannot reach rank 0."""
    remedy = (
        "Set MASTER_ADDR, for all ranks, to the address by which the others "
        "reach the host of rank 0."
    )
    host = addresses_lib.split(launched.master)[0]
    named_so = host in (numeric, "localhost")
    alone = launched.local_size == launched.size
    if addresses_lib.is_loopback(numeric) and not (named_so or alone):
        raise ValueError(
            f"Rank 0 of {launched.launcher} runs on {host!r}, which to itself "
            f"is {numeric}: only processes of this host would reach it. "
            f"{remedy}"
        )
    family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((numeric, 0))
    except OSError as error:
        raise ValueError(
            f"Rank 0 of {launched.launcher} shall listen at "
            f"{launched.master!r}, but {numeric} is no address of its host: "
            f"{error}. {remedy}"
        ) from error
