# SPDX-License-Identifier: Apache-2.0
"""Every rank gets two connections to every other, where its host says."""

import contextlib
import itertools
import os
import pathlib
import resource
import socket
import threading
import time

import pytest

from tfdist_ext.comm import connection
from tfdist_ext.comm import mesh
from tfdist_ext.comm import ranks
from tfdist_ext.comm.connection import Neighbours
from tfdist_ext.comm.listener import Listening

LIMIT = 60.0
SECRET = b"0123456789abcdef" * 2


def connect_all(
    addresses, listening=None, secrets=None, timeout=LIMIT, share=None
):
    """Connections, or the error, of every rank; all run at once."""
    outcomes = [None] * len(addresses)

    def call(rank):
        try:
            outcomes[rank] = mesh.connect(
                rank,
                addresses,
                secret=secrets[rank] if secrets else SECRET,
                timeout=timeout,
                listening=listening[rank] if listening else None,
                share_memory=share is None or share[rank],
            )
        except (RuntimeError, ValueError) as error:
            outcomes[rank] = error

    threads = [
        threading.Thread(target=call, args=(rank,), daemon=True)
        for rank in range(len(addresses))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return outcomes


def addresses_of(host, count, port):
    host = f"[{host}]" if ":" in host else host
    return [f"{host}:{port if rank == 0 else rank}" for rank in range(count)]


@contextlib.contextmanager
def closing(outcomes):
    """Closes all connections; an error among them fails the test."""
    try:
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        yield outcomes
    finally:
        for outcome in outcomes:
            for pair in outcome if isinstance(outcome, list) else ():
                for each in pair or ():
                    if each is not None:
                        each.close()


def assert_joined(meshes):
    """What a rank writes to another comes out there, and nowhere else."""
    count = len(meshes)
    for rank, peer in itertools.permutations(range(count), 2):
        for kind in range(2):
            text = f"{rank} {peer} {kind}".encode()
            meshes[rank][peer][kind].sendall(text)
            assert meshes[peer][rank][kind].recv(100) == text
    assert all(meshes[rank][rank] is None for rank in range(count))


def assert_shared(meshes, share):
    """Both ranks of a pair have the same memory, and ring each other."""
    for rank, peer in itertools.permutations(range(len(meshes)), 2):
        if not (share[rank] and share[peer]):
            assert meshes[rank][peer].shared is None
            continue
        assert_same_memory(meshes, rank, peer)


def assert_same_memory(meshes, rank, peer):
    ours, theirs = meshes[rank][peer].shared, meshes[peer][rank].shared
    os.write(ours.bell, b"x")
    assert os.read(theirs.bell, 9) == b"x"
    text = f"{rank} {peer}".encode()
    os.pwrite(ours.memory, text, 100)
    assert os.pread(theirs.memory, len(text), 100) == text


@pytest.mark.parametrize("count", [2, 3, 11])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_all_pairs_are_joined(count, host, free_port):
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    addresses = addresses_of(host, count, free_port())
    with closing(connect_all(addresses)) as meshes:
        assert_joined(meshes)
        assert_shared(meshes, [True] * count)


@pytest.mark.parametrize("without", [0, 1, 2])
def test_memory_is_shared_where_both_want_it(without, free_port):
    share = [rank != without for rank in range(3)]
    addresses = addresses_of("127.0.0.1", 3, free_port())
    with closing(connect_all(addresses, share=share)) as meshes:
        assert_joined(meshes)
        assert_shared(meshes, share)


def test_without_memory_ranks_talk_by_tcp(free_port, monkeypatch, caplog):
    """A container may allow none; it is said once per rank."""

    def none_is_left(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "posix_fallocate", none_is_left)
    files = len(os.listdir("/proc/self/fd"))
    addresses = addresses_of("127.0.0.1", 3, free_port())
    with closing(connect_all(addresses)) as meshes:
        assert_joined(meshes)
        assert_shared(meshes, [False] * 3)
    assert sorted(r.getMessage() for r in caplog.records) == [
        "tfdist_ext: rank 1 shares no memory with ranks [0] of this host "
        "(no space left) and uses TCP for them.",
        "tfdist_ext: rank 2 shares no memory with ranks [0, 1] of this host "
        "(no space left) and uses TCP for them.",
    ]
    assert len(os.listdir("/proc/self/fd")) == files


def test_unauthenticated_peers_get_no_memory(free_port):
    """Who finds the Unix socket, and has no token, is not heard.

    A crowd of them may keep the ranks from sharing, and not from meeting.
    """
    stop = threading.Event()

    def connect_to_all():
        while not stop.wait(0.001):
            lines = pathlib.Path("/proc/net/unix").read_text().splitlines()
            for line in lines:
                if "@tfdist-" not in line:
                    continue
                with (
                    contextlib.suppress(OSError),
                    socket.socket(socket.AF_UNIX) as peer,
                ):
                    peer.setblocking(False)
                    peer.connect("\0" + line.split("@")[1].strip())
                    socket.send_fds(peer, [b"x" * 32], [1, 1, 1])

    thread = threading.Thread(target=connect_to_all)
    thread.start()
    try:
        for _ in range(10):
            addresses = addresses_of("127.0.0.1", 3, free_port())
            with closing(connect_all(addresses)) as meshes:
                assert_joined(meshes)
                shared = [
                    {
                        peer
                        for peer in range(3)
                        if peer != rank and mesh[peer].shared
                    }
                    for rank, mesh in enumerate(meshes)
                ]
                for rank, peer in itertools.permutations(range(3), 2):
                    assert (peer in shared[rank]) == (rank in shared[peer])
                    if peer in shared[rank]:
                        assert_same_memory(meshes, rank, peer)
    finally:
        stop.set()
        thread.join()


class Died(BaseException):
    """As if the process were killed: nobody is told."""


def end_at(stage, rank, error, monkeypatch):
    """Lets a rank fail at a stage: "met", "connected" or "shared"."""
    ends = set()  # its thread

    def end(at):
        if at == stage and threading.get_ident() in ends:
            raise error

    meeting, share = ranks.rendezvous, Neighbours.share
    finish = ranks.Rendezvous.finish

    @contextlib.contextmanager
    def meet(own, *arguments, **options):
        if own == rank:
            ends.add(threading.get_ident())
        with meeting(own, *arguments, **options) as met:
            end("met")
            yield met

    def share_memory(*arguments):
        end("connected")
        return share(*arguments)

    def finish_all(*arguments):
        end("shared")
        return finish(*arguments)

    monkeypatch.setattr(ranks, "rendezvous", meet)
    monkeypatch.setattr(Neighbours, "share", share_memory)
    monkeypatch.setattr(ranks.Rendezvous, "finish", finish_all)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


@pytest.mark.parametrize("dead", [0, 1, 2])
@pytest.mark.parametrize("stage", ["met", "connected", "shared"])
def test_a_rank_that_ends_after_it_has_met_is_named(
    dead, stage, free_port, monkeypatch
):
    """By all others, within seconds, and not when the time is over."""
    addresses = addresses_of("127.0.0.1", 3, free_port())
    end_at(stage, dead, Died(), monkeypatch)
    began = time.monotonic()
    outcomes = connect_all(addresses)
    assert time.monotonic() - began < 10
    name = f"rank {dead} ({addresses[dead]}) ended while the ranks connect"
    for rank in {0, 1, 2} - {dead}:
        assert name in str(outcomes[rank])
    assert outcomes[dead] is None


def test_why_a_rank_fails_while_ranks_connect_is_told(free_port, monkeypatch):
    error = RuntimeError("no memory on this host")
    end_at("connected", 1, error, monkeypatch)
    addresses = addresses_of("127.0.0.1", 3, free_port())
    outcomes = connect_all(addresses)
    assert str(outcomes[1]) == "no memory on this host"
    for rank in (0, 2):
        assert str(outcomes[rank]) == (
            f"rank {rank} ({addresses[rank]}): rank 1 ({addresses[1]}) failed: "
            "no memory on this host"
        )


def test_the_limit_of_descriptors_is_raised(free_port):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
    try:
        addresses = addresses_of("127.0.0.1", 3, free_port())
        with closing(connect_all(addresses)) as meshes:
            assert_shared(meshes, [True] * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("allowed", [64 + 3, 64 + 6, 64 + 12])
def test_too_few_descriptors_are_named(allowed, free_port, monkeypatch, caplog):
    """With the number that is needed: to connect, or to share memory."""
    limit = len(os.listdir("/proc/self/fd")) - 1 + allowed
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    addresses = addresses_of("127.0.0.1", 3, free_port())
    with pytest.raises(RuntimeError) as raised:
        mesh.connect(0, addresses, secret=SECRET, timeout=0.1)
    few = "needs 70 more" in str(raised.value)
    assert few == (allowed == 64 + 3)
    if few:
        assert f"may have {limit}. Raise the hard limit" in str(raised.value)
    text = "shares no memory with ranks of this host and uses TCP"
    assert (text in caplog.text) == (allowed == 64 + 6)
    assert ("needs 76 more" in caplog.text) == (allowed == 64 + 6)


def test_idle_unauthenticated_peers_do_not_keep_ranks_from_sharing(
    free_port, monkeypatch
):
    """They fill the queue of every rank's Unix socket, and send nothing."""
    with contextlib.ExitStack() as peers:
        make = connection.Neighbours.__init__

        def make_with_peers(neighbours, wanted=True):
            make(neighbours, wanted)
            for _ in range(200):
                peer = peers.enter_context(socket.socket(socket.AF_UNIX))
                peer.setblocking(False)
                try:
                    peer.connect(f"\0{neighbours.name}")
                except BlockingIOError:  # it is full
                    return
            raise AssertionError("the queue has no end")

        monkeypatch.setattr(connection.Neighbours, "__init__", make_with_peers)
        addresses = addresses_of("127.0.0.1", 3, free_port())
        with closing(connect_all(addresses)) as meshes:
            assert_joined(meshes)
            assert_shared(meshes, [True] * 3)


def test_other_users_get_no_memory(free_port, monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    addresses = addresses_of("127.0.0.1", 2, free_port())
    with closing(connect_all(addresses)) as meshes:
        assert_joined(meshes)
        assert_shared(meshes, [False] * 2)


def test_the_memory_of_a_host_grows_with_its_ranks(free_port):
    for count in range(2, 300):
        ring = connection.ring_bytes(count)
        assert ring & (ring - 1) == 0
        pairs = count * (count - 1) // 2
        assert pairs * 2 * ring <= count * (8 << 20)
        assert count > 9 or ring == 1 << 20
    addresses = addresses_of("127.0.0.1", 11, free_port())
    with closing(connect_all(addresses)) as meshes:
        memory = meshes[0][1].shared.memory
        assert os.fstat(memory).st_size == 2 * (
            4096 + connection.ring_bytes(11)
        )


def test_ranks_listen_by_their_interface_in_their_range(free_port):
    """Any address of the loopback network stands for one more interface."""
    ports = range(free_port(), 65536)
    listening = [
        Listening("127.0.0.9"),
        Listening("lo", ports),
        Listening("127.0.0.7", ports),
    ]
    addresses = addresses_of("127.0.0.1", 3, free_port())
    with closing(connect_all(addresses, listening)) as meshes:
        assert_joined(meshes)
        hosts = {
            (rank, peer): meshes[rank][peer][0].getpeername()
            for rank in range(3)
            for peer in range(rank)
        }
        assert hosts[1, 0][0] == hosts[2, 0][0] == "127.0.0.9"
        assert hosts[2, 1][0] == "127.0.0.1"
        assert hosts[2, 1][1] in ports[:100]


def test_other_secrets_do_not_meet(free_port):
    addresses = addresses_of("127.0.0.1", 2, free_port())
    outcomes = connect_all(addresses, secrets=[b"a", b"b"], timeout=2)
    assert "secret" in str(outcomes[1])
    assert "rank 1" in str(outcomes[0])


def test_a_taken_range_is_named(free_port):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        only = Listening(ports=range(port, port + 1))
        addresses = addresses_of("127.0.0.1", 2, free_port())
        outcomes = connect_all(addresses, [Listening(), only], timeout=2)
    assert f"TFDIST_PORT_RANGE={port}-{port} are taken" in str(outcomes[1])
    assert "rank 1 (127.0.0.1:1) cannot listen" in str(outcomes[1])


def test_listening_of_an_environment():
    nothing = Listening.of({"TFDIST_PORT_RANGE": ""})
    assert nothing == Listening()
    assert nothing.host("localhost:1") == "127.0.0.1"
    given = Listening.of(
        {"TFDIST_INTERFACE": "lo", "TFDIST_PORT_RANGE": "20000-20009"}
    )
    assert given == Listening("lo", range(20000, 20010))
    assert given.host("10.1.2.3:1") == "127.0.0.1"
    assert Listening.of({"TFDIST_PORT_RANGE": "80"}).ports == range(80, 81)
    assert Listening("fe80::1").host("") == "fe80::1"


@pytest.mark.parametrize("text", ["x", "-5", "0-3", "9-8", "1-70000", "1-2-3"])
def test_a_range_that_is_none_is_named(text):
    with pytest.raises(ValueError, match=f"TFDIST_PORT_RANGE={text}"):
        Listening.of({"TFDIST_PORT_RANGE": text})


def test_an_interface_that_is_none_is_named():
    with pytest.raises(ValueError, match=r"TFDIST_INTERFACE=eth77 .* lo"):
        Listening("eth77").host("127.0.0.1:1")


def test_an_address_of_another_host_is_named(free_port):
    addresses = addresses_of("127.0.0.1", 2, free_port())
    start = time.monotonic()
    outcomes = connect_all(
        addresses, [Listening("127.0.0.1"), Listening("192.0.2.1")], timeout=2
    )
    assert "rank 1 (127.0.0.1:1) cannot listen on 192.0.2.1" in str(outcomes[1])
    assert "rank 1" in str(outcomes[0])
    assert time.monotonic() - start < 20
