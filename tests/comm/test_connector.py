# SPDX-License-Identifier: Apache-2.0
"""Connecting ends in time, whatever listens, and asks no more than it must."""

import contextlib
import errno
import itertools
import random
import socket
import subprocess
import sys
import threading
import time

import pytest

from tfdist_ext.comm import connector
from tfdist_ext.comm.connector import connect
from tfdist_ext.comm.handshake import Job
from tfdist_ext.comm.listener import Listener

JOB = Job("ranks", b"0123456789abcdef" * 2)
LIMIT = 30.0


def deadline(seconds=LIMIT):
    return time.monotonic() + seconds


@contextlib.contextmanager
def black_hole(host):
    """An address that takes no connection: its queue is full."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind((host, 0))
        full.listen(0)
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        time.sleep(0.05)
        yield full.getsockname()[1]


@contextlib.contextmanager
def silent(host, port, message=b"", pause=0.05):
    """Accepts connections and sends each byte of a message after a pause."""
    stop = threading.Event()

    def serve():
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            while True:
                came = stack.enter_context(server.accept()[0])
                for byte in message:
                    came.sendall(bytes([byte]))
                    if stop.wait(pause):
                        return

    with socket.create_server((host, port)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            stop.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT)


def name(monkeypatch, *hosts):
    """Lets every name have these addresses, in this order."""

    def resolve(_, port, **__):
        return [
            (
                socket.AF_INET6 if ":" in host else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (host, port),
            )
            for host in hosts
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def accepting(listener):
    thread = threading.Thread(
        target=lambda: list(listener.accept(JOB, deadline())), daemon=True
    )
    thread.start()
    return thread


@pytest.mark.parametrize("host", ["127.0.0.3", "::1"])
def test_addresses_of_a_name_are_raced(host, monkeypatch):
    """One drops packets, one accepts and is silent, one refuses."""
    with (
        black_hole("127.0.0.2") as port,
        silent("127.0.0.4", port),
        Listener((host, port), [1]) as listener,
    ):
        name(monkeypatch, "127.0.0.2", "127.0.0.4", "127.0.0.5", host)
        thread = accepting(listener)
        began = time.monotonic()
        with connect(("n0", port), JOB, 1, deadline()) as connection:
            assert connection.getpeername()[0] == host
        assert time.monotonic() - began < connector.TCP_SECONDS
        thread.join(LIMIT)


def test_families_take_turns(monkeypatch):
    name(monkeypatch, "::1", "::2", "::3", "127.0.0.1", "127.0.0.2")
    found = connector.resolve(("n0", 7))
    assert [where[0] for _, where in found] == [
        *("::1", "127.0.0.1", "::2", "127.0.0.2", "::3")
    ]


def test_an_address_that_drops_packets_does_not_hide_a_later_listener(
    monkeypatch,
):
    """It is tried again when the other one listens."""
    with black_hole("127.0.0.2") as port:
        name(monkeypatch, "127.0.0.2", "127.0.0.3")
        monkeypatch.setattr(connector, "TCP_SECONDS", 0.5)
        came = []
        thread = threading.Thread(
            target=lambda: came.append(
                connect(("n0", port), JOB, 1, deadline())
            ),
            daemon=True,
        )
        thread.start()
        time.sleep(0.6)
        with Listener(("127.0.0.3", port), [1]) as listener:
            assert len(list(listener.accept(JOB, deadline(10)))) == 1
        thread.join(LIMIT)
        came.pop().close()


@pytest.mark.parametrize("message", [b"", b"tfdist\r\n" * 100], ids=len)
def test_a_listener_that_drips_ends_with_the_deadline(message):
    """The limit is that of the handshake, not of each byte."""
    with silent("127.0.0.1", 0, message) as port:
        began = time.monotonic()
        with pytest.raises(OSError):
            connect(("127.0.0.1", port), JOB, 1, deadline(1.0))
        assert time.monotonic() - began < 8


def test_a_handshake_has_a_limit_of_its_own(monkeypatch):
    """After which it is tried again, long before the deadline."""
    monkeypatch.setattr(connector, "HANDSHAKE_SECONDS", 0.2)
    tries, real = [], connector.resolve

    def resolve(address):
        tries.append(address)
        if len(tries) == 3:
            raise OSError(errno.EMFILE, "enough")  # ends all tries
        return real(address)

    monkeypatch.setattr(connector, "resolve", resolve)
    began = time.monotonic()
    with (
        silent("127.0.0.1", 0, b"tfdist\r\n" * 100) as port,
        pytest.raises(OSError, match="enough"),
    ):
        connect(("127.0.0.1", port), JOB, 1, deadline())
    assert time.monotonic() - began < 5


class Clock:
    """Of which no time passes but by sleeping."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now += max(seconds, 1e-6)


def test_who_waits_sleeps(monkeypatch):
    """500 ranks would ask a name server thousands of times a second."""
    random.seed(1)
    clock, tries, said = Clock(monkeypatch), [], []

    def resolve(*_, **__):
        tries.append(clock.now - 1000)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(socket.gaierror):
        connect(("n0", 7), JOB, 1, deadline(300), report=said.append)
    assert len(tries) < 150
    # Whoever comes is found within a tenth of the time that has passed.
    for first, second in itertools.pairwise(tries):
        assert second - first < max(0.15, 0.13 * first)
    assert tries[-1] > 290
    assert said == ["[Errno -2] Name or service not known"]


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_listener_of_this_host_is_found_at_once(host, free_port, monkeypatch):
    """However long ranks have waited for the last one."""
    clock, tries = Clock(monkeypatch), []
    resolve = connector.resolve
    address = (host, free_port()) if host else "tfdist nobody listens here"

    def try_again(address):
        tries.append(clock.now - 1000)
        return resolve(address)

    monkeypatch.setattr(connector, "resolve", try_again)
    with pytest.raises(OSError, match="refused"):
        connect(address, JOB, 1, deadline(100))
    gaps = [second - first for first, second in itertools.pairwise(tries)]
    assert max(gaps) < 0.15
    assert min(gaps[:-1]) > 0.05  # it sleeps, too


def test_checks_go_on_while_it_waits(free_port):
    calls = itertools.count()

    def check():
        if next(calls) == 3:
            raise RuntimeError("rank 3 has ended")

    with pytest.raises(RuntimeError, match="rank 3"):
        connect(("127.0.0.1", free_port()), JOB, 1, deadline(), check=check)


LITTLE = """
import os, resource, socket, sys, time
from tfdist_ext.comm import connector, listener
from tfdist_ext.comm.handshake import Job
job = Job("ranks", b"0123456789abcdef" * 2)
used = len(os.listdir("/proc/self/fd")) - 1
began = time.monotonic()
try:
    if sys.argv[1] == "listen":
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, used + 4))
        with listener.Listener(("127.0.0.1", 0), range(1, 9)) as listens:
            client = socket.socket()
            client.connect(listens.address)
            list(listens.accept(job, time.monotonic() + 20))
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, used + 1))
        connector.connect(("127.0.0.1", 9), job, 1, time.monotonic() + 20)
except OSError as error:
    assert time.monotonic() - began < 5
    print(error)
"""


@pytest.mark.parametrize(("way", "missing"), [("listen", 8), ("connect", None)])
def test_too_few_descriptors_are_named(way, missing):
    """At once, with the number that is needed."""
    done = subprocess.run(
        [sys.executable, "-c", LITTLE, way],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert "Too many open files" in done.stdout, done.stderr
    assert "Raise the hard limit: `ulimit -Hn" in done.stdout
    if missing:
        assert f"{missing} connections are missing" in done.stdout
