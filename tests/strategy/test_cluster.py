# SPDX-License-Identifier: Apache-2.0
"""What is wrong with TF_CONFIG, or its absence, is said before the start."""

import ipaddress
import json
import os
import socket

import pytest
import tensorflow as tf

from tfdist_ext.strategy import cluster as cluster_lib

_FIRST = {"type": "worker", "index": 0}
OTHERS = [
    ("horovodrun", {"HOROVOD_SIZE": "2"}),
    ("Open MPI", {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}),
    ("MPICH", {"PMI_SIZE": "16", "PMI_RANK": "3"}),
    ("srun", {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}),
    ("PMIx", {"PMIX_RANK": "1"}),
]
ALONE = [
    {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
    {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "3333"},  # srun --pty
]


def config(workers, task=_FIRST, **jobs):
    return json.dumps({"cluster": {"worker": workers, **jobs}, "task": task})


@pytest.fixture
def read(monkeypatch):
    """Reads a TF_CONFIG, None for none, beside other variables."""
    launchers = "HOROVOD_", "OMPI_", "PMI", "SLURM_", "MASTER_"
    for name in tuple(os.environ):
        if name.startswith(launchers) or name.endswith(("RANK", "SIZE")):
            monkeypatch.delenv(name)

    def read(text, **variables):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        if text is not None:
            monkeypatch.setenv("TF_CONFIG", text)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        return cluster_lib.read(resolver)

    return read


def test_ranks_are_the_chief_and_then_the_workers_by_number(read):
    workers = [f"127.0.0.1:{port}" for port in range(4000, 4012)]
    task = {"type": "worker", "index": "10"}
    found = read(config(workers, task, chief=["127.0.0.1:5000"]))
    assert found.addresses == ["127.0.0.1:5000", *workers]
    assert found.own_address == "127.0.0.1:4010"
    numbered = {str(i): address for i, address in enumerate(workers)}
    found = read(config(numbered, task))
    assert found.addresses == workers
    assert (found.job, found.index) == ("worker", 10)


@pytest.mark.parametrize("text", [None, "{}", '{"environment": "cloud"}'])
def test_without_a_cluster_a_process_is_alone(read, text):
    found = read(text)
    assert not found.addresses and found.own_address == ""


@pytest.mark.parametrize("address", ["localhost:0", "[::1]:4001", "a.b:65535"])
def test_a_single_task_is_a_cluster(read, address):
    assert read(config([address])).own_address == address


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "it holds a list"),
        ('{"cluster": 3}', "does not describe a cluster"),
        ('{"cluster": {"worker": 3}}', "does not describe a cluster"),
        (config("a:1"), "must be a list or a dictionary"),
        (config([4001]), "Task address 4001"),
        (config(["a:1"], {"type": "worker", "index": "x"}), "'x'"),
        (config(["a:1"], {"type": "worker", "index": 1e999}), "infinity"),
        (config(["a:1"], {"type": "worker", "index": 1}), "no task 1 of type"),
        (config(["a:1"], {"type": "worker", "index": -1}), "no task -1"),
        (config(["a:1"], {"type": "chief", "index": 0}), "type 'chief'"),
        (config(["a:1"], {"type": "worker"}), "which task this process is"),
        (config(["a:1"], None), "does not describe a cluster"),
        ('{"task": {"type": "worker", "index": 1}}', "task 1, but no cluster"),
        (config({"0": "a:1", "2": "c:1"}), r"indices \[0, 2\], not 0 to 1"),
        (config(["a:1"], chief=["b:1", "c:1"]), "more than one 'chief'"),
        (config(["a:1"], ps=["b:1"]), "'chief' and 'worker' only"),
        (config(["a"]), "rank 0 must be HOST:PORT.*not 'a'"),
        (config([":1"]), "rank 0 must be HOST:PORT"),
        (config(["a:1", "b:x"]), "rank 1 must be HOST:PORT.*'b:x'"),
        (config(["::1:4001"]), r"\[HOST\]:PORT for IPv6, not '::1:4001'"),
        (config(["a:99999"]), "1 to 65535, not 'a:99999'"),
        (config(["a:1", "b:0"]), "rank 1 must have a port.*'b:0'"),
        (config(["a:1", "b:1", "a:1"]), "ranks 0 and 2 have the same.*'a:1'"),
    ],
)
def test_what_is_wrong_is_named(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text)


def test_an_address_of_another_host_is_not_ours(read):
    # TEST-NET-1, nobody's address.
    both = ["127.0.0.1:4001", "192.0.2.1:4001"]
    with pytest.raises(ValueError, match=r"others reach it\.$"):
        read(config(both))
    with pytest.raises(ValueError, match=r"task 1.*'192.0.2.1:4001'.*index"):
        read(config(both, {"type": "worker", "index": 1}))
    with pytest.raises(ValueError, match="means all interfaces"):
        read(config(["0.0.0.0:4001", "127.0.0.1:4002"]))


@pytest.fixture
def names(monkeypatch):
    """Gives names the addresses of a test; others cannot be resolved."""
    known = {}

    def resolve(host, port, **_):
        try:
            found = known.get(host) or [str(ipaddress.ip_address(host))]
        except ValueError:
            raise socket.gaierror(-2, "Name or service not known") from None
        return [
            (
                socket.AF_INET6 if ":" in each else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (each, port or 0),
            )
            for each in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("other", ["n1", "10.0.0.2", "not-known-yet"])
def test_a_host_that_is_loopback_to_itself_is_refused(
    read, names, index, other
):
    """As in Debian's /etc/hosts: other hosts would wait in vain."""
    names.update(n0=["127.0.1.1"], n1=["10.0.0.2"])
    workers = ["n0:1", f"{other}:2", f"{other}:3"]
    if index:
        workers = [workers[1], workers[0], workers[2]]
    text = config(workers, {"type": "worker", "index": index})
    with pytest.raises(ValueError, match=r"'n0', which resolves to 127\.0\.1"):
        read(text)


def test_ranks_of_one_host_may_call_it_by_any_of_its_names(read, names):
    names.update(n0=["127.0.1.1"], localhost=["127.0.0.1", "::1"])
    for other in ("n0:2", "localhost:2", "127.0.0.1:2", "[::1]:2"):
        assert read(config(["n0:1", other])).own_address == "n0:1"
    # An address that others reach counts more, in whatever order.
    names.update(n0=["127.0.1.1", "10.0.0.1"])
    assert cluster_lib.addresses_lib.bind_address("n0:1") == "10.0.0.1"


def test_an_interface_serves_others_where_the_name_does_not(read, names):
    """Rank 0 listens at its name in any case."""
    names.update(n0=["127.0.1.1"], n1=["127.0.1.1"], far=["10.0.0.2"])
    second = config(["far:1", "n1:2"], {"type": "worker", "index": 1})
    assert read(second, TFDIST_INTERFACE="lo").rank == 1
    with pytest.raises(ValueError, match="which resolves to"):
        read(config(["n0:1", "far:2"]), TFDIST_INTERFACE="lo")


@pytest.mark.parametrize(("launcher", "variables"), OTHERS)
def test_processes_that_cannot_meet_do_not_train_apart(
    read, launcher, variables
):
    first = next(iter(variables))
    message = rf"{launcher}.*{first}.*tfdist-run -n.*unset {first}"
    for text in (None, "{}"):
        with pytest.raises(RuntimeError, match=message):
            read(text, **variables)
    # Who names the ranks knows what he does, be it one.
    assert read(config(["127.0.0.1:4001"]), **variables).addresses


def test_processes_of_another_launcher_are_ranks(read):
    local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    variables = {"RANK": "1", "WORLD_SIZE": "3", **local, "MASTER_ADDR": "n9"}
    found = read(None, **variables)
    assert (found.job, found.index, found.rank) == ("worker", 1, 1)
    assert found.addresses[0] == found.launched.master == "n9:29500"
    assert len(found.addresses) == 3
    # TF_CONFIG wins.
    both = read(config(["127.0.0.1:4001"]), **variables)
    assert both.launched is None and both.addresses == ["127.0.0.1:4001"]


@pytest.mark.parametrize("variables", ALONE)
def test_one_process_in_an_allocation_is_alone(read, variables):
    assert not read(None, **variables).addresses
