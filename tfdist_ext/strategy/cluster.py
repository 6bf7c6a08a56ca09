# SPDX-License-Identifier: Apache-2.0
"""Ranks read from TF_CONFIG or from a launcher, validated before the start."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Mapping
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.comm import addresses as addresses_lib
from tfdist_ext.comm.listener import Listening
from tfdist_ext.launch import launched as launched_lib
from tfdist_ext.type_names import ClusterResolver

_EXAMPLE = (
    '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_BAD = (TypeError, AttributeError, KeyError, ValueError, OverflowError)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Tasks with their addresses, and the task of this process.

    Attributes:
        jobs: addresses "host:port" by job, "chief" before "worker"; empty for
            a single process.
        job: job of this process; "" for a single process.
        index: index of this process within the job.
        launched: what a launcher sets if there is no TF_CONFIG.
    """

    jobs: Mapping[str, list[str]]
    job: str = ""
    index: int = 0
    launched: launched_lib.Launched | None = None

    @property
    def addresses(self) -> list[str]:
        """The addresses of all ranks, in rank order."""
        return [address for tasks in self.jobs.values() for address in tasks]

    @property
    def rank(self) -> int:
        """Index of this process among all ranks."""
        chiefs = len(self.jobs.get("chief", ())) if self.job == "worker" else 0
        return chiefs + self.index

    @property
    def own_address(self) -> str:
        """Address of this process; "" for a single process."""
        return self.jobs[self.job][self.index] if self.jobs else ""


def read(resolver: ClusterResolver) -> Cluster:
    """Reads the cluster of a resolver and validates it.

    Args:
        resolver: the cluster resolver of the strategy.

    Raises:
        ValueError: TF_CONFIG is malformed, or its tasks cannot be ranks.
        RuntimeError: there is no TF_CONFIG, and another launcher started
            several processes without saying how they connect.
    """
    if isinstance(
        resolver, tf.distribute.cluster_resolver.TFConfigClusterResolver
    ):
        _check_json(os.environ.get("TF_CONFIG", "{}"))
    try:
        found = resolver.cluster_spec().as_dict()
        job, index = resolver.task_type or "", resolver.task_id
    except _BAD as error:
        raise _malformed(str(error)) from error
    jobs = {name: found[name] for name in sorted(found)}
    if not jobs:
        return _read_launched(index)
    _check_jobs(jobs, job, index)
    cluster = Cluster(jobs, job, index)
    _check_addresses(cluster)
    return cluster


def _malformed(why: str) -> ValueError:
    return ValueError(
        f"TF_CONFIG does not describe a cluster: {why}. Received: TF_CONFIG="
        f"{os.environ.get('TF_CONFIG', '')[:1000]!r}. It must be like "
        f"{_EXAMPLE}, with this process's own index. Without TF_CONFIG one "
        "process trains alone."
    )


def _check_json(text: str) -> None:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"it is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise _malformed(f"it holds a {type(config).__name__}, not an object")


def _read_launched(index: int | None) -> Cluster:
    """Reads the cluster from a launcher if TF_CONFIG has none.

    Raises:
        ValueError: TF_CONFIG has a task index above 0.
        RuntimeError: another launcher started several processes without
            saying how they connect.
    """
    if index:
        raise _malformed(f"it names task {index}, but no cluster")
    launched = launched_lib.read(os.environ)
    if launched is None:
        return Cluster({})
    return Cluster(
        {"worker": launched.names}, "worker", launched.rank, launched
    )


def _check_jobs(
    jobs: Mapping[str, Sequence[str]], job: str, index: int | None
) -> None:
    """Rejects tasks that cannot be ranks, and an unknown own task."""
    wrong = set(jobs) - {"chief", "worker"}
    if wrong or job not in ("", "chief", "worker"):
        raise ValueError(
            "HybridParallelStrategy runs on the tasks 'chief' and 'worker' "
            "only: every rank trains. Received a TF_CONFIG with cluster "
            f"{dict(jobs)} and task type {job!r}."
        )
    for name, tasks in jobs.items():
        if not isinstance(tasks, list):  # as_dict() returns a dict for gaps.
            raise _malformed(
                f"the tasks of {name!r} have the indices {sorted(tasks)}, not "
                f"0 to {len(tasks) - 1}"
            )
    if len(jobs.get("chief", ())) > 1:
        raise _malformed("it has more than one 'chief'")
    if job == "" or index is None:
        raise _malformed("it does not say which task this process is")
    if not 0 <= index < len(jobs.get(job, ())):
        raise _malformed(f"it has no task {index} of type {job!r}")


def _check_addresses(cluster: Cluster) -> None:
    """Rejects addresses at which ranks cannot be reached."""
    addresses = cluster.addresses
    alone = len(addresses) == 1
    for rank, address in enumerate(addresses):
        host, colon, port = address.rpartition(":")
        bare = ":" in host and not (host[0] == "[" and host[-1] == "]")
        if not host or not colon or bare or not port.isdecimal():
            raise _malformed(
                f"the address of rank {rank} must be HOST:PORT, and "
                f"[HOST]:PORT for IPv6, not {address!r}"
            )
        # A single rank may take any port (0). Others must know the port.
        if not (0 if alone else 1) <= int(port) < 1 << 16:
            raise _malformed(
                f"the address of rank {rank} must have a port from 1 to "
                f"65535, not {address!r}"
            )
        if addresses.index(address) != rank:
            raise _malformed(
                f"ranks {addresses.index(address)} and {rank} have the same "
                f"address {address!r}"
            )
    if not alone:
        _check_own_host(cluster)


def _check_own_host(cluster: Cluster) -> None:
    """Rejects an own address of another host, or one that is unreachable."""
    address = cluster.own_address
    numeric = addresses_lib.bind_address(address)
    _check_loopback(cluster, numeric)
    family, kind, _, _, where = socket.getaddrinfo(
        numeric, 0, type=socket.SOCK_STREAM
    )[0]
    try:
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError as error:
        raise ValueError(
            f"TF_CONFIG says that this process is task {cluster.index} of "
            f"{cluster.job!r} at {address!r}, but {numeric} is not an address "
            f"of this host: {error}. Is the index that of another host's "
            "task? Give every process its own, and every task the address by "
            "which others reach it."
        ) from error


def _check_loopback(cluster: Cluster, numeric: str) -> None:
    """Rejects an own address on loopback if ranks run on other hosts.

    Raises:
        ValueError: this host's name resolves to a loopback address.
    """
    # If an interface is set, ranks other than 0 listen on it instead.
    if cluster.rank and Listening.of(os.environ).interface:
        return
    if not addresses_lib.is_loopback(numeric):
        return
    own = addresses_lib.split(cluster.own_address)[0]
    hosts = {addresses_lib.split(each)[0] for each in cluster.addresses}
    for host in sorted(hosts - {own}):
        if not addresses_lib.is_of_this_host(host):
            remedy = (
                ""
                if addresses_lib.is_local_name(own)
                else f"; or correct the line of {own!r} in its /etc/hosts"
            )
            raise ValueError(
                f"TF_CONFIG names this host {own!r}, which resolves to "
                f"{numeric} here: only processes of this host can reach that "
                f"address, and {host!r} is another host. Name this host in "
                "TF_CONFIG, for all ranks, by the address by which others "
                f"reach it{remedy}."
            )
