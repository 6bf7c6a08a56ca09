# SPDX-License-Identifier: Apache-2.0
"""Who is what in TensorFlow's cluster: roles, addresses, TF_CONFIG."""

import json
import socket
from typing import Any

from benchmarks import network

_FIRST_PORT = 2222


def with_parameter_servers(net: network.Network) -> network.Network:
    """Puts a worker and a parameter server on every host, a chief on the first.

    They share their host's interface, and with it the limits and counters.
    The chief is rank 0, for it is the one that sets the pace.
    """
    hosts = len(net.hosts)
    return network.Network(
        hosts=(net.hosts[0], *net.hosts, *net.hosts),
        prefixes=(net.prefixes[0], *net.prefixes, *net.prefixes),
        interface=net.interface,
        roles=("chief", *("worker",) * hosts, *("ps",) * hosts),
    )


def by_host(results: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Merges the results of `with_parameter_servers`' ranks per host.

    CPU time and peak memory of a host's processes are added; each of them has
    read the same byte counters.
    """
    chief, others = results[0], results[1:]
    hosts = len(others) // 2
    merged = []
    for host in range(hosts):
        members = [others[host], others[hosts + host]]
        members += [chief] if host == 0 else []
        cpu_ms = sum(member["per_step"]["cpu_ms"] for member in members)
        memory = sum(member["peak_rss_bytes"] for member in members)
        per_step = {**others[host]["per_step"], "cpu_ms": cpu_ms}
        merged.append({**chief, "per_step": per_step, "peak_rss_bytes": memory})
    return tuple(merged)


def tf_configs(net: network.Network) -> list[str]:
    """TF_CONFIG of every rank; "" for one that is alone."""
    if len(net.hosts) == 1:
        return [""]
    roles = net.roles or ("worker",) * len(net.hosts)
    members: dict[str, list[str]] = {}
    tasks = []
    for role, address in zip(roles, _addresses(net), strict=True):
        tasks.append({"type": role, "index": len(members.get(role, ()))})
        members.setdefault(role, []).append(address)
    return [json.dumps({"cluster": members, "task": task}) for task in tasks]


def _addresses(net: network.Network) -> list[str]:
    """Fixed ports in namespaces, else free ones."""
    if net.interface:
        return [
            f"{host}:{_FIRST_PORT + rank}"
            for rank, host in enumerate(net.hosts)
        ]
    sockets = [socket.socket() for _ in net.hosts]
    try:
        for host, free in zip(net.hosts, sockets, strict=True):
            free.bind((host, 0))
        return [f"127.0.0.1:{free.getsockname()[1]}" for free in sockets]
    finally:
        for free in sockets:
            free.close()
