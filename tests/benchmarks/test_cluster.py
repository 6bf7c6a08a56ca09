# SPDX-License-Identifier: Apache-2.0
"""Roles, ports and merged figures of a cluster with parameter servers."""

import json

from benchmarks import cluster
from benchmarks import network

_NET = network.Network(("10.0.0.1", "10.0.0.2"), (("in", "0"), ("in", "1")), "")


def test_one_rank_needs_no_cluster():
    assert cluster.tf_configs(network.loopback(1)) == [""]


def test_ranks_are_workers_unless_said_otherwise():
    configs = [json.loads(c) for c in cluster.tf_configs(network.loopback(3))]
    assert [c["task"] for c in configs] == [
        {"type": "worker", "index": rank} for rank in range(3)
    ]
    assert len(set(configs[0]["cluster"]["worker"])) == 3


def test_every_host_has_a_worker_and_a_server():
    net = cluster.with_parameter_servers(_NET)
    assert net.roles == ("chief", "worker", "worker", "ps", "ps")
    assert [prefix[1] for prefix in net.prefixes] == ["0", "0", "1", "0", "1"]


def test_processes_of_a_namespace_have_ports_of_their_own():
    counted = network.Network(_NET.hosts, _NET.prefixes, "eth0")
    configs = [
        json.loads(c)
        for c in cluster.tf_configs(cluster.with_parameter_servers(counted))
    ]
    members = configs[0]["cluster"]
    assert {role: len(names) for role, names in members.items()} == {
        "chief": 1,
        "worker": 2,
        "ps": 2,
    }
    assert members["ps"][1].startswith("10.0.0.2:")
    assert len({name for names in members.values() for name in names}) == 5
    assert configs[4]["task"] == {"type": "ps", "index": 1}


def _result(cpu_ms, egress, memory):
    figures = {"cpu_ms": cpu_ms, "egress_bytes": egress}
    return {"per_step": figures, "peak_rss_bytes": memory}


def test_figures_of_a_host_are_those_of_its_processes():
    chief = {**_result(1, 10, 100), "steps": 7}
    workers = (_result(2, 10, 200), _result(3, 20, 300))
    servers = (_result(4, 11, 400), _result(5, 21, 500))
    first, second = cluster.by_host((chief, *workers, *servers))
    assert first["per_step"] == {"cpu_ms": 7, "egress_bytes": 10}
    assert second["per_step"] == {"cpu_ms": 8, "egress_bytes": 20}
    assert (first["peak_rss_bytes"], second["peak_rss_bytes"]) == (700, 800)
    assert first["steps"] == second["steps"] == 7
